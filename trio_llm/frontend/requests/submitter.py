"""RequestSubmitter: how a prompt becomes a live request, step by step, with nothing left of one that is refused.

Used by `AsyncLLM`, for streams, vectors and sessions alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass

import trio

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.requests.deadlines import seconds_left
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.input_processor import (
    check_cache_salt,
    check_priority,
    check_request_id,
    make_internal_id,
)
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.requests.sessions import Session, StreamingInput, check_session_params
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestSpec", "RequestSubmitter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a caller asks for besides the prompt. Not checked yet, the types neither."""

    external_id: str
    params: SamplingParams | PoolingParams
    kind: type[SamplingParams] | type[PoolingParams] = SamplingParams
    """Of parameters: the one that suits what is asked for."""
    priority: int = 0
    cache_salt: str | None = None


class RequestSubmitter:
    """Lets requests of one client in.

    Args:
        client: whose admission, renderer and input processor count.
    """

    def __init__(self, client: EngineClient, live: RequestRegistry) -> None:
        self._client = client
        self._live = live
        self._sessions: set[Session] = set()
        """Those whose inputs are being read."""

    async def admit(self, prompt: str | list[int], wish: RequestSpec) -> InFlightRequest:
        """Check, register and send a request.

        Cancellation: safe; nothing of it is left.

        Raises:
            InvalidRequestError, NotSupportedError, OverloadedError, EngineUnavailableError, EngineDeadError: it is
                refused.
        """
        arrived_s = trio.current_time()
        check_request_id(wish.external_id)
        _check_kind(wish)
        self._client.check_admission()
        renderer, params = self._client.renderer, wish.params
        token_ids = await renderer.render_prompt(prompt)
        bad_words: list[list[int]] = []
        if isinstance(params, SamplingParams) and params.bad_words:
            bad_words = await renderer.render_bad_words(params.bad_words)
        await trio.lowlevel.checkpoint()
        # The engine may have died while the text became tokens. From here on nothing waits: a request is either
        # registered and queued for sending, or nothing of it is left.
        self._client.check_admission()
        request = self._client.input_processor.process(
            token_ids,
            params,
            request_id=make_internal_id(wish.external_id),
            priority=wish.priority,
            cache_salt=wish.cache_salt,
            deadline_s=seconds_left(),
            bad_words_token_ids=bad_words,
        )
        return self._live.submit(request, wish.external_id, arrived_s)

    async def admit_session(
        self, inputs: AsyncIterable[StreamingInput], wish: RequestSpec, nursery: trio.Nursery
    ) -> InFlightRequest:
        """Register a session, whose inputs are read in `nursery`. Cancellation and errors: as `admit`."""
        check_request_id(wish.external_id)
        _check_kind(wish)
        assert isinstance(wish.params, SamplingParams)
        check_priority(wish.priority)
        check_cache_salt(wish.cache_salt)
        check_session_params(wish.params)
        await trio.lowlevel.checkpoint()
        self._client.check_admission()
        session = Session(
            inputs,
            EngineCoreRequest(
                make_internal_id(wish.external_id),
                [],
                wish.params,
                priority=wish.priority,
                resumable=True,
                cache_salt=wish.cache_salt,
            ),
            external_id=wish.external_id,
            renderer=self._client.renderer,
            input_processor=self._client.input_processor,
            requests=self._live,
        )
        self._sessions.add(session)
        nursery.start_soon(self._run_session, session)
        return session.request

    def drain(self) -> None:
        """Sessions take no further input. Synchronous."""
        for session in self._sessions:
            session.drain()

    async def _run_session(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            self._sessions.remove(session)


def _check_kind(wish: RequestSpec) -> None:
    """
    Raises:
        InvalidRequestError: an answer was asked for with the parameters of a vector, or the other way round.
    """
    if not isinstance(wish.params, wish.kind):
        raise InvalidRequestError(f"params must be {wish.kind.__name__}, not {type(wish.params).__name__}", "params")
