"""RequestSubmitter: a prompt becomes a registered request, step by step; a request that is refused leaves nothing.

Used by `AsyncLLM`, for streams, vectors and sessions alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Never, Protocol

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.keyword_errors import make_keyword_error
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.balancing import ANYWHERE, Routing
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.input_processor import (
    InputProcessor,
    check_cache_salt,
    check_priority,
    check_request_id,
    find_age_s,
    make_external_id,
    make_internal_id,
)
from trio_llm.frontend.requests.pooling import result_of
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.requests.sessions import Session, StreamingInput, check_session_params
from trio_llm.frontend.requests.stream import GenerateStream, seconds_left
from trio_llm.frontend.tracing.headers import pick_trace_headers
from trio_llm.frontend.tracing.observers import RequestObservers
from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.tokenization import PLAIN, TokenizationParams
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestCalls", "RequestSpec", "RequestSubmitter", "SubmitterHost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a caller asks for besides the prompt. Nothing is checked yet, not even the types."""

    external_id: str
    params: SamplingParams | PoolingParams
    kind: type[SamplingParams] | type[PoolingParams] = SamplingParams
    """The kind of parameters that suits what is asked for."""
    priority: int = 0
    cache_salt: str | None = None
    routing: Routing = ANYWHERE
    tokenization: TokenizationParams = PLAIN
    arrival_time_s: float | None = None
    """When the request arrived, in seconds since 1970; None: now."""
    trace_headers: Mapping[str, str] | None = None

    @property
    def room(self) -> int:
        """Tokens that the context needs at least for what comes after the prompt."""
        return (self.params.max_tokens or 1) if isinstance(self.params, SamplingParams) else 0


class SubmitterHost(Protocol):
    """What the submitter needs of the client that it submits for."""

    config: EngineConfig

    @property
    def renderer(self) -> Renderer: ...

    @property
    def input_processor(self) -> InputProcessor: ...

    def check_accepting(self) -> None:
        """
        Raises:
            EngineUnavailableError: the engine is loading, draining or asleep.
            EngineDeadError: it is gone.
        """
        ...

    def check_admission(self) -> None:
        """
        Raises:
            OverloadedError: as much is unfinished as may be.
            EngineError: as `check_accepting`.
        """
        ...


class RequestSubmitter:
    """Takes the requests of one client."""

    def __init__(self, host: SubmitterHost, registry: RequestRegistry, observers: RequestObservers) -> None:
        self._host = host
        self.registry = registry
        self.observers = observers
        self.nursery: trio.Nursery | None = None
        """The nursery of `open_llm`, in which sessions run. Set by the owner when its tasks run."""
        self.is_draining = False
        self._sessions: set[Session] = set()
        """Sessions whose inputs are being read."""

    def open_stream(self, prompt: str | list[int] | AsyncIterable[StreamingInput], spec: RequestSpec) -> GenerateStream:
        """A request as a block, which is admitted when it is entered; with an iterable as the prompt, a session."""
        admit: Callable[[], Awaitable[InFlightRequest]]
        if not isinstance(prompt, str | list) and isinstance(prompt, AsyncIterable):
            admit = partial(self._admit_session, prompt, spec)
        else:
            admit = partial(self._admit, prompt, spec)
        return GenerateStream(spec.external_id, admit, self.registry.leave, self.registry.resubmit)

    async def _admit(self, prompt: str | list[int], spec: RequestSpec) -> InFlightRequest:
        """Check, register and send a request.

        Cancellation: safe; nothing of it is left.

        Raises:
            InvalidRequestError, NotSupportedError, OverloadedError, EngineUnavailableError, EngineDeadError: it is
                refused.
        """
        arrived_s = trio.current_time() - find_age_s(spec.arrival_time_s)
        self._check_spec(spec)
        token_ids, bad_words = await self._render(prompt, spec)
        await trio.lowlevel.checkpoint()
        # The engine may have died while the text became tokens. From here on nothing waits: a request is either
        # registered and queued for sending, or nothing of it is left. `submit` asks whether the load permits it.
        self._host.check_accepting()
        request = self._host.input_processor.process(
            token_ids,
            spec.params,
            request_id=make_internal_id(spec.external_id),
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            deadline_s=seconds_left(),
            bad_words_token_ids=bad_words,
        )
        text = prompt if isinstance(prompt, str) else None
        report = self._make_report(request, spec, arrived_s)
        in_flight = self.registry.submit(request, report, spec.routing)
        in_flight.collector.prompt = text
        self.observers.on_arrival(report, request, text)
        return in_flight

    def _make_report(self, request: EngineCoreRequest, spec: RequestSpec, arrived_s: float) -> RequestReport:
        """
        Raises:
            InvalidRequestError: its trace headers are no headers.
        """
        return RequestReport(
            external_id=spec.external_id,
            params=request.pooling_params or request.params,
            arrived_s=arrived_s,
            trace_headers=None if spec.trace_headers is None else pick_trace_headers(spec.trace_headers),
            on_end=self.observers.on_end,
        )

    def _check_spec(self, spec: RequestSpec) -> None:
        """
        Raises:
            InvalidRequestError: something is wrong that has nothing to do with the loaded model.
        """
        check_request_id(spec.external_id)
        _check_kind(spec)
        self.registry.check_routing(spec.routing)
        check_priority(spec.priority)
        if spec.priority != 0 and self._host.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {spec.priority}, but this engine serves requests in the order in which they come; leave "
                "priority out, or start the engine with --scheduling-policy priority",
                "priority",
            )

    async def _render(self, prompt: str | list[int], spec: RequestSpec) -> tuple[list[int], list[list[int]]]:
        """The tokens of the prompt and of `bad_words`. Nothing is rendered for a request that is refused now anyway."""
        words = spec.params.bad_words if isinstance(spec.params, SamplingParams) else ()
        if not isinstance(prompt, str) and not words and not spec.tokenization.may_cut:
            return prompt, []
        self._host.check_admission()
        renderer = self._host.renderer
        token_ids = await renderer.render_prompt(prompt, spec.tokenization, room=spec.room)
        return token_ids, await renderer.render_bad_words(words) if words else []

    async def _admit_session(self, inputs: AsyncIterable[StreamingInput], spec: RequestSpec) -> InFlightRequest:
        """Register a session, whose inputs are read in the nursery. Cancellation and errors: as `_admit`."""
        arrived_s = trio.current_time() - find_age_s(spec.arrival_time_s)
        self._check_spec(spec)
        assert isinstance(spec.params, SamplingParams)
        check_cache_salt(spec.cache_salt)
        check_session_params(spec.params)
        if spec.tokenization != PLAIN:
            raise InvalidRequestError(
                "tokenization cannot be set when the prompt is an iterable of inputs; give them as token ids",
                "tokenization",
            )
        await trio.lowlevel.checkpoint()
        self._host.check_admission()
        blank = EngineCoreRequest(
            make_internal_id(spec.external_id),
            [],
            spec.params,
            priority=spec.priority,
            resumable=True,
            cache_salt=spec.cache_salt,
        )
        report = self._make_report(blank, spec, arrived_s)
        session = Session(
            inputs,
            blank,
            report=report,
            routing=spec.routing,
            renderer=self._host.renderer,
            input_processor=self._host.input_processor,
            registry=self.registry,
        )
        self.observers.on_arrival(report, blank, None)
        self._sessions.add(session)
        assert self.nursery is not None
        self.nursery.start_soon(self._run_session, session)
        return session.request

    def drain(self) -> None:
        """Let sessions take no further input. Synchronous."""
        self.is_draining = True
        for session in self._sessions:
            session.drain()

    async def _run_session(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            self._sessions.remove(session)


class RequestCalls:
    """The calls of `EngineClient` that make and end requests, for a client that has a `RequestSubmitter`."""

    _submitter: RequestSubmitter

    def generate(  # noqa: PLR0913 - as `EngineClient.generate`
        self,
        prompt: str | list[int] | AsyncIterable[StreamingInput],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tokenization: TokenizationParams | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        **unknown: Never,
    ) -> GenerateStream:
        if unknown:
            raise make_keyword_error("generate", "prompt", unknown)
        spec = RequestSpec(
            external_id=make_external_id(request_id),
            params=params if params is not None else SamplingParams(),
            priority=priority,
            cache_salt=cache_salt,
            routing=Routing(data_parallel_rank=data_parallel_rank, session_id=session_id),
            tokenization=PLAIN if tokenization is None else tokenization,
            arrival_time_s=arrival_time,
            trace_headers=trace_headers,
        )
        return self._submitter.open_stream(prompt, spec)

    async def encode(  # noqa: PLR0913 - as `EngineClient.encode`
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tokenization: TokenizationParams | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> PoolingOutput:
        spec = RequestSpec(
            external_id=make_external_id(request_id),
            params=params if params is not None else PoolingParams(),
            kind=PoolingParams,
            priority=priority,
            routing=Routing(data_parallel_rank=data_parallel_rank, session_id=session_id),
            tokenization=PLAIN if tokenization is None else tokenization,
            arrival_time_s=arrival_time,
            trace_headers=trace_headers,
        )
        async with self._submitter.open_stream(prompt, spec) as stream:
            output = await anext(stream)
        return result_of(output, is_draining=self._submitter.is_draining)

    def abort(self, request_ids: str | Iterable[str]) -> int:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return sum(self._submitter.registry.abort(request_id) for request_id in ids)

    def is_tracing_enabled(self) -> bool:
        return self._submitter.observers.is_tracing

    def drain(self) -> None:
        self._submitter.drain()

    async def wait_idle(self) -> None:
        await self._submitter.registry.wait_idle()


def _check_kind(spec: RequestSpec) -> None:
    """
    Raises:
        InvalidRequestError: an answer was asked for with the parameters of a vector, or the other way round; or the
            tokenization is of no use.
    """
    if not isinstance(spec.params, spec.kind):
        raise InvalidRequestError(f"params must be {spec.kind.__name__}, not {type(spec.params).__name__}", "params")
    if not isinstance(spec.tokenization, TokenizationParams):
        kind = type(spec.tokenization).__name__
        raise InvalidRequestError(f"tokenization must be TokenizationParams, not {kind}", "tokenization")
