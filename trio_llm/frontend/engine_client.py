"""EngineClient: the interface to a model that is served somewhere.

The HTTP routes use nothing else. `AsyncLLM` implements it over local engine processes. The names are vLLM's.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.control_client import ControlClient
from trio_llm.outputs import PoolingOutput

if TYPE_CHECKING:
    from trio_llm.config import EngineConfig
    from trio_llm.frontend.kv_events import KVEventBatches
    from trio_llm.frontend.rendering.renderer import Renderer
    from trio_llm.frontend.requests.sessions import StreamingInput
    from trio_llm.frontend.requests.stream import RequestStream
    from trio_llm.frontend.statistics.totals import EngineStatistics
    from trio_llm.pooling import PoolingParams
    from trio_llm.sampling import SamplingParams
    from trio_llm.tokenization import TokenizationParams
    from trio_llm.wire.messages import ModelConfig

__all__ = ["EngineClient"]


class EngineClient(ControlClient, abc.ABC):
    """A model to generate with, wherever it runs."""

    config: EngineConfig

    @property
    @abc.abstractmethod
    def model_config(self) -> ModelConfig:
        """Limits and names of the loaded model.

        Raises:
            EngineUnavailableError: it is still loading.
        """

    @property
    @abc.abstractmethod
    def renderer(self) -> Renderer:
        """Chat messages and text to token ids, with the loaded model's tokenizer. Raises as `model_config`."""

    # ------------------------------------------------------------------------------------- requests

    @abc.abstractmethod
    def generate(  # noqa: PLR0913 - what vLLM lets a request say, by the same names
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
    ) -> RequestStream:
        """Generate for one prompt (text or token ids).

        Use: `async with llm.generate(...) as stream: async for output in stream: ...`

        Args:
            prompt: an async iterable makes the request a session: see `StreamingInput`.
            params: None: all defaults.
            request_id: the caller's id, 1 to 256 characters; need not be unique. None: one is made.
            priority: requests with a lower one are served first; 64 bits. Other ones than 0 are refused unless
                `EngineConfig.scheduling_policy` is `priority`.
            cache_salt: 1 to 256 characters; only requests with the same salt share what is computed of their prompts.
                None: shared with all requests that have none.
            data_parallel_rank: of the engine that gets the request. None: the one with the least to do, or that knows
                the beginning of the prompt.
            session_id: 1 to 256 characters; the engine that had the last request of the same session gets this one.
            tokenization: how a text becomes tokens, and how a long prompt is cut. None: all defaults. Not for sessions.
            arrival_time: seconds since 1970, for a request that has waited elsewhere: latencies count from then.
            trace_headers: `traceparent`, `tracestate`. None: the parent is OpenTelemetry's current span, if any.

        The deadline of the cancel scopes around the caller goes with the request: the engine drops it if it has not
        begun by then, and gets it again if the stream is read on all the same.

        Cancellation: anywhere; leaving the block aborts the request in the engine, which costs a step at most.

        Raises (on entering):
            InvalidRequestError: the request can never work.
            OverloadedError: as much is unfinished as may be.
            EngineUnavailableError: the engine is loading, draining or asleep.
            EngineDeadError: the engine is gone.
        """

    @abc.abstractmethod
    def abort(self, request_ids: str | Iterable[str]) -> int:
        """Abort every running request with one of these callers' ids. Synchronous; returns how many there were. Their
        readers get what was generated, with the finish reason `abort`."""

    async def encode(  # noqa: PLR0913 - as `generate`
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
        """One vector for one prompt (text or token ids): its embedding, or a number for each class.

        Args:
            params: None: all defaults.
            others: as `generate`.

        The deadline of the cancel scopes around the caller goes with the request, as with `generate`.

        Cancellation: safe; the request is aborted in the engine, which costs at most the step in flight.

        Raises:
            InvalidRequestError: the request can never work.
            NotSupportedError: the model has no such task, or this client no such method.
            OverloadedError: as much is unfinished as may be.
            EngineUnavailableError: the engine is loading, draining or asleep; also if a drain ends this request.
            EngineGenerateError: this request failed, or was aborted by its id.
            EngineDeadError: the engine is gone.
        """
        self._refuse("encode")

    @abc.abstractmethod
    def check_admission(self) -> None:
        """Raise what entering `generate()` would raise for no fault of the request: the engine is loading, draining,
        asleep, dead or full."""

    # ---------------------------------------------------------------------------------------- state

    @property
    @abc.abstractmethod
    def status(self) -> EngineStatus:
        """State, phase and progress, from the first moment on. Never raises."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Refuse new requests, and inputs of sessions, from now on; what runs goes on to its end.

        Cannot be undone; calling it twice is harmless. Sessions end as `generate` says.
        """

    @abc.abstractmethod
    async def wait_idle(self) -> None:
        """Wait until no request is unfinished.

        Cancellation: safe.
        """

    @abc.abstractmethod
    async def check_health(self) -> None:
        """Return if the engine answers a round trip through its loop, also while draining.

        Cancellation: safe; nothing stays behind.

        Raises:
            EngineUnavailableError: loading, or being started again.
            EngineDeadError: the engine is gone.
        """

    @property
    @abc.abstractmethod
    def is_running(self) -> bool:
        """Requests are accepted now."""

    @property
    def is_stopped(self) -> bool:
        """The opposite of `is_running`."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """The engine is dead for good."""
        return self.dead_error is not None

    @property
    @abc.abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead, or None."""

    @abc.abstractmethod
    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead for good, and return why. Cancellation: safe."""

    @property
    @abc.abstractmethod
    def should_keep_api_server_alive(self) -> bool:
        """A dead engine does not end the server."""

    @abc.abstractmethod
    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do: `generate`, `embed`, `classify`, `score`. Raises as `model_config`."""

    def is_tracing_enabled(self) -> bool:
        """Spans of requests are recorded, and sent to a collector."""
        return False

    def statistics(self) -> EngineStatistics:
        """What runs and waits now, and what was done so far. Synchronous.

        Raises:
            NotSupportedError: statistics are off (`disable_log_stats`).
        """
        self._refuse("statistics")

    def kv_events(self, *, max_unread: int = 1024) -> AbstractAsyncContextManager[KVEventBatches]:
        """What enters and leaves the engine's prefix cache from now on, for routers with prefix affinity.

        Use: `async with llm.kv_events() as batches: async for batch in batches: ...`. Each batch has `events`:
        `BlockStored`, `BlockRemoved` and `AllBlocksCleared`. Applied in order they give the hashes of the blocks that
        can be found; a subscription before the first request misses none.

        Args:
            max_unread: how many batches may wait for this subscriber; at least 1. One more, and it gets
                KVEventsLostError after them; it may subscribe again.

        Cancellation: leaving the block, by any way, ends the subscription.

        Raises (at once):
            NotSupportedError: the engine was opened without `EngineConfig(kv_events=True)`.

        Raises (on entering):
            EngineDeadError: the engine is gone; the iteration, too, ends with it. An engine that is started again has
                an empty cache, and its events begin with `AllBlocksCleared`.
        """
        self._refuse("kv_events")

    @abc.abstractmethod
    def do_log_stats(self) -> None:
        """Write one line of statistics to the log now."""
