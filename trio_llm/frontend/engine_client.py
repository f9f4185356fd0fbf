"""EngineClient: the interface to a model that is served somewhere.

The HTTP routes use nothing else. `AsyncLLM` implements it over local engine processes. The names are vLLM's.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from trio_llm.errors import EngineDeadError, NotSupportedError
from trio_llm.frontend.control.status import EngineStatus
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
    from trio_llm.wire.messages import ModelConfig, PlainValue

__all__ = ["EngineClient"]


class EngineClient(abc.ABC):
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
    def generate(
        self,
        prompt: str | list[int] | AsyncIterable[StreamingInput],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestStream:
        """Generate for one prompt (text or token ids).

        Use: `async with llm.generate(...) as stream: async for output in stream: ...`

        Args:
            prompt: an async iterable makes the request a session: see `StreamingInput`.
            params: None: all defaults.
            request_id: the caller's id, 1 to 256 characters; need not be unique. None: one is made.
            priority: requests with a lower one are served first; 64 bits.
            cache_salt: 1 to 256 characters; only requests with the same salt share what is computed of their prompts.
                None: shared with all requests that have none.
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

    async def encode(
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> PoolingOutput:
        """One vector for one prompt (text or token ids): its embedding, or a number for each class.

        Arguments, and the deadline of the cancel scopes around the caller: as with `generate`.

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
        """What runs and waits now, and what was done so far. Synchronous; never raises where it is supported."""
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

    # --------------------------------------- control; NotSupportedError from clients that do not implement a method
    #
    # Calls that change something are made one after the other, in the order in which they came, between two steps of
    # the engine. Each is idempotent. A call that is cancelled before its turn is not made; later it is carried out all
    # the same. Each raises EngineUnavailableError while the model loads, and EngineDeadError when the engine is gone.

    async def sleep(self, level: int = 1) -> None:
        """Give back the memory of the KV cache, and the weights' memory on the device, until `wake_up`.

        Level 1 keeps the weights in host memory, level 2 drops them. Running requests wait, and are computed again from
        their first token on; new ones are refused with EngineUnavailableError.

        Raises:
            InvalidRequestError: there is no such level.
        """
        self._refuse("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`: for `weights`, for `kv_cache`, or for both. Requests go on when both are awake.

        Weights that were dropped are read again from where they came from.

        Raises:
            InvalidRequestError: there is no such tag.
            EngineGenerateError: not enough memory, or the weights cannot be read: that part still sleeps.
        """
        self._refuse("wake_up")

    async def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        self._refuse("is_sleeping")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating until `resume_generation`. New requests are taken, and wait.

        Args:
            mode: `abort`: unfinished requests end, with that finish reason. `wait`: those that have begun go on, and
                this returns when they are over. `keep`: they stop where they are, and go on from there.
            clear_cache: no later request finds what was computed before.

        Cancellation: as above; once begun, the pause stays in force.

        Raises:
            InvalidRequestError: there is no such mode.
            EngineGenerateError: `wait`, and another call has undone the pause before those were over.
        """
        self._refuse("pause_generation")

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        self._refuse("resume_generation")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` is in force."""
        self._refuse("is_paused")

    async def reset_prefix_cache(self) -> None:
        """Let no later request find what was computed before."""
        self._refuse("reset_prefix_cache")

    async def collective_rpc(
        self, method: str, args: Sequence[PlainValue] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method on every worker. Returns one answer per worker.

        The methods: `ping`, `memory_info` (bytes), `model_info`, `check_scheduler`.

        Args:
            timeout_s: up to a day.

        Cancellation: the answer is dropped.

        Raises:
            InvalidRequestError: there is no such method (the text lists those there are), or it takes other arguments.
            EngineGenerateError: it failed.
            RequestTimeoutError: no answer came in time.
        """
        self._refuse("collective_rpc")

    async def start_profile(self) -> None:
        """Start the engine's profiler, unless it runs.

        Raises:
            NotSupportedError: there is no `profile_dir`, or nothing to profile.
        """
        self._refuse("start_profile")

    async def stop_profile(self) -> str | None:
        """Stop the engine's profiler. Returns the path of the trace, None if it did not run. Raises as `start_profile`,
        and EngineGenerateError if the trace cannot be written."""
        self._refuse("stop_profile")

    async def update_weights(self, path: str, *, version: str) -> None:
        """Compute all tokens from now on with other weights of the same architecture.

        Running requests go on, and their tokens so far are computed again; the prefix cache is emptied. All is checked
        before anything is changed.

        Args:
            path: a directory in Hugging Face form.
            version: what `RequestOutput.weight_version` says from now on; up to 256 characters.

        Raises:
            InvalidRequestError: the directory has no such weights, or the weights sleep now. Nothing has changed.
        """
        self._refuse("update_weights")

    async def add_lora(self, name: str, path: str) -> None:
        """Load an adapter."""
        self._refuse("add_lora")

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter."""
        self._refuse("remove_lora")

    async def list_loras(self) -> list[str]:
        """Names of the loaded adapters."""
        self._refuse("list_loras")

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter loaded."""
        self._refuse("pin_lora")

    def _refuse(self, method: str) -> NoReturn:
        raise NotSupportedError(f"{type(self).__name__} does not support {method}()")
