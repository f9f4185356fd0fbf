"""AsyncLLM: an engine as an object in a Trio program. `open_llm()` is the way to get one.

Implements `EngineClient` over a core client. The nursery of its tasks is held by `open_llm` (opening.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineStartupError,
    EngineUnavailableError,
    NotSupportedError,
)
from trio_llm.frontend.control.calls import ControlCalls, EngineControl
from trio_llm.frontend.control.monitor import EngineMonitor
from trio_llm.frontend.control.state import NOBODY
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.control.utility_calls import UtilityCalls
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.frontend.core_client.link import OnlyEngineLink
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.kv_events import KVEventBatches, KVEventHub
from trio_llm.frontend.output_handler import OutputHandler, OutputHandlerHooks
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.input_processor import InputProcessor, make_external_id
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.pooling import result_of
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.requests.stream import GenerateStream
from trio_llm.frontend.requests.submitter import RequestSpec, RequestSubmitter
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.statistics.stats import StatLogger
from trio_llm.frontend.statistics.totals import EngineStatistics, Totals
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import ModelConfig, Progress, Ready, UtilityResult

__all__ = ["AsyncLLM"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S: Final = 10.0


class AsyncLLM(ControlCalls, EngineClient):
    """One engine in this process' care. Made by `open_llm()` only."""

    def __init__(
        self,
        core: CoreClient,
        config: EngineConfig,
        stat_loggers: Sequence[StatLogger],
        *,
        keep_alive_on_engine_death: bool,
    ) -> None:
        self.config = config
        self._core = core
        self._keep_alive = keep_alive_on_engine_death
        self._totals = Totals()
        self._recorder = StatisticsRecorder([self._totals, *stat_loggers])
        limits = AdmissionLimits(
            max_num_queued_reqs=config.max_num_queued_reqs, max_num_queued_tokens=config.max_num_queued_tokens
        )
        self._ledger = AdmissionLedger(limits, self._recorder.rejection)
        self._utilities = UtilityCalls(core)
        self._link = OnlyEngineLink(core)
        self._live = RequestRegistry([self._link], self._recorder, self._ledger, self._on_request_gone)
        self._entrance = RequestSubmitter(self, self._live)
        self._control = EngineControl(self._utilities, self._check_ready)
        self._kv_events = KVEventHub()
        self._life = EngineMonitor(
            config,
            kill=core.kill,
            num_expected=self._num_expected,
            is_under_control=lambda: self._control.is_under_way,
        )
        self._handler = OutputHandler(
            core,
            self._live,
            self._recorder,
            OutputHandlerHooks(
                on_sign_of_life=self._life.sign_of_life,
                on_step=self._life.step,
                on_progress=self._on_progress,
                on_ready=self._on_ready,
                on_utility_result=self._on_utility_result,
                on_lost=self._on_lost,
                on_kv_events=self._kv_events.put,
                on_dead=self._on_dead,
            ),
            ack_steps=max(1, config.credit_steps // 8),
        )
        self._has_ready_message = trio.Event()
        self._ready_message: Ready | None = None
        self._settled = trio.Event()
        """Ready or dead."""
        self._nursery: trio.Nursery | None = None
        """Of `open_llm`, once its tasks run."""
        self._idle_waiters = trio.lowlevel.ParkingLot()
        self._is_draining = False
        self._is_closed = False
        self._model_config: ModelConfig | None = None
        self._renderer: Renderer | None = None
        self._input_processor: InputProcessor | None = None

    # -------------------------------------------------------------------------------- what is loaded

    @property
    def model_config(self) -> ModelConfig:
        if self._model_config is None:
            raise self._life.not_ready()
        return self._model_config

    @property
    def renderer(self) -> Renderer:
        if self._renderer is None:
            raise self._life.not_ready()
        return self._renderer

    @property
    def input_processor(self) -> InputProcessor:
        if self._input_processor is None:
            raise self._life.not_ready()
        return self._input_processor

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.model_config.tasks

    # -------------------------------------------------------------------------------------- requests

    def generate(
        self,
        prompt: str | list[int] | AsyncIterable[StreamingInput],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> GenerateStream:
        wish = RequestSpec(
            external_id=make_external_id(request_id),
            params=params if params is not None else SamplingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        admit: Callable[[], Awaitable[InFlightRequest]]
        if not isinstance(prompt, str | list) and isinstance(prompt, AsyncIterable):
            admit = partial(self._admit_session, prompt, wish)
        else:
            admit = partial(self._entrance.admit, prompt, wish)
        return GenerateStream(wish.external_id, admit, self._live.leave, self._live.resubmit)

    async def encode(
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> PoolingOutput:
        chosen = params if params is not None else PoolingParams()
        wish = RequestSpec(
            external_id=make_external_id(request_id), params=chosen, kind=PoolingParams, priority=priority
        )
        admit = partial(self._entrance.admit, prompt, wish)
        async with GenerateStream(wish.external_id, admit, self._live.leave, self._live.resubmit) as stream:
            output = await anext(stream)
        return result_of(output, is_draining=self._is_draining)

    async def _admit_session(self, inputs: AsyncIterable[StreamingInput], wish: RequestSpec) -> InFlightRequest:
        assert self._nursery is not None
        return await self._entrance.admit_session(inputs, wish, self._nursery)

    def abort(self, request_ids: str | Iterable[str]) -> int:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return sum(self._live.abort(request_id) for request_id in ids)

    def check_admission(self) -> None:
        if self._is_draining and self._life.dead_error is None:
            raise EngineUnavailableError("the server is shutting down and takes no new requests")
        self._check_ready()
        self._control.check_awake()
        self._ledger.check()

    # ----------------------------------------------------------------------------------------- state

    @property
    def status(self) -> EngineStatus:
        status = self._life.status(is_draining=self._is_draining)
        if status.state == "ready" and self._control.state.is_asleep:
            reason = f"it sleeps (level {self._control.state.sleep_level}); wake it up"
            return EngineStatus(state="asleep", elapsed_s=status.elapsed_s, reason=reason)
        return status

    @property
    def is_running(self) -> bool:
        return self.status.state == "ready"

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._life.dead_error

    @property
    def should_keep_api_server_alive(self) -> bool:
        return self._keep_alive

    async def wait_until_ready(self) -> None:
        """Wait until the model is loaded. Cancellation: safe; loading goes on.

        Raises:
            EngineStartupError: the engine ended before.
            EngineDeadError: the engine ended since.
        """
        await self._settled.wait()
        self._check_ready()

    async def wait_dead(self) -> EngineDeadError:
        return await self._life.wait_dead()

    async def check_health(self) -> None:
        self._check_ready()
        if self._life.lost is not None:
            raise self._life.not_ready()
        await self._utilities.call("ping", max_deaths=1)

    async def check_scheduler(self) -> dict[str, int]:
        """Let the engine assert its scheduler's invariants, and return its counts of requests and blocks.

        Cancellation: safe.

        Raises:
            EngineGenerateError: an invariant does not hold.
            EngineUnavailableError: the model is still loading.
            EngineDeadError: the engine is gone.
        """
        self._check_ready()
        counts = await self._utilities.call("check_scheduler")
        if not isinstance(counts, dict):
            raise EngineGenerateError(f"the engine answered check_scheduler with {counts!r}")
        return {name: int(value or 0) for name, value in counts.items()}

    def drain(self) -> None:
        self._is_draining = True
        self._entrance.drain()

    async def wait_idle(self) -> None:
        await trio.lowlevel.checkpoint()
        while len(self._live):
            await self._idle_waiters.park()

    def statistics(self) -> EngineStatistics:
        model = self._model_config
        return self._totals.snapshot(self.status.state, num_blocks=0 if model is None else model.num_blocks)

    def kv_events(self, *, max_unread: int = 1024) -> AbstractAsyncContextManager[KVEventBatches]:
        if not self.config.kv_events:
            raise NotSupportedError("this engine tells no KV events; set EngineConfig(kv_events=True)")
        return self._kv_events.subscribe(max_unread)

    def do_log_stats(self) -> None:
        self._recorder.log()

    # ----------------------------------------------------------------------------------------- tasks

    async def _run(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        nursery.start_soon(self._core.run)
        nursery.start_soon(self._handler.run)
        nursery.start_soon(self._control.run)
        nursery.start_soon(self._log_statistics)
        nursery.start_soon(self._life.watch)
        await self._start_up()

    async def _start_up(self) -> None:
        """Wait for the engine's first `Ready`, then load the tokenizer that belongs to its weights."""
        await self._has_ready_message.wait()
        if self._ready_message is None:
            return
        model = self._ready_message.model
        self._life.progress = Progress(0, "tokenizer", 0, 0)
        try:
            renderer = await self._load_renderer(model)
        except EngineStartupError as error:
            self._core.kill(str(error), for_good=True)
            return
        self._live.processor = OutputProcessor(renderer.token_table)
        model = self._ready_message.model  # another engine's, if the first one died meanwhile
        self._renderer = renderer
        self._input_processor = InputProcessor(model)
        self._model_config = model
        self._life.is_ready = True
        self._settled.set()

    async def _load_renderer(self, model: ModelConfig) -> Renderer:
        load = partial(Renderer.load, Path(model.model_dir), model.max_model_len, logits_width=model.logits_width)
        return await trio.to_thread.run_sync(load)

    async def _log_statistics(self) -> None:
        while True:
            await trio.sleep(_LOG_INTERVAL_S)
            self._recorder.log()

    # ----------------------------------------------------------------------------------------- hooks

    def _on_progress(self, progress: Progress) -> None:
        self._life.progress = progress

    def _on_ready(self, ready: Ready) -> None:
        before = self._ready_message
        self._life.ready()
        if before is not None and ready.model.logits_width != before.model.logits_width:
            self._core.kill("another model was found where the engine's was: requests cannot go on with that")
            return
        self._ready_message = ready
        self._has_ready_message.set()
        if before is None:
            return
        if self._model_config is not None:  # else the tokenizer is still being loaded
            self._model_config = ready.model
            self._input_processor = InputProcessor(ready.model)
        logger.warning("the engine is ready again and goes on with %d requests", len(self._live))
        self._recorder.engines[0].engine_restarted()
        # What control calls have made of the engine comes before any request, and calls that wait come after: one may
        # ask for the end of what runs.
        for call in self._control.replay():
            self._core.send_nowait(call)
        self._link.is_up = True
        self._live.on_engine_ready(0)
        self._utilities.resume()

    def _on_lost(self, lost: EngineLost) -> None:
        self._life.lose(lost)
        self._kv_events.clear()
        self._utilities.lose_engine(lost.reason)
        self._link.is_up = False
        self._live.on_engine_lost(0, lost.reason, could_run=self._could_run)

    def _could_run(self, state: RequestState) -> bool:
        control = self._control.state
        # A pause that waits lets those go on that have begun.
        return not control.is_held or (control.pause == "wait" and not control.is_asleep and state.num_tokens > 0)

    def _on_utility_result(self, result: UtilityResult) -> None:
        if result.call_id != NOBODY:
            self._utilities.resolve(result)
            return
        self._control.has_replayed()
        if result.error is not None:
            # Requests must not go on with, say, other weights than they began with.
            self._core.kill(f"a fresh engine could not be brought to where the dead one was: {result.error}")

    def _num_expected(self) -> int:
        return 0 if self._control.state.is_held else self._live.num_expected(0)

    def _close(self) -> None:
        """The block of `open_llm` is left: nobody waits for an answer any more. Synchronous."""
        if self._life.dead_error is None:
            self._is_closed = True
            error = EngineDeadError("the block of open_llm() was left, and the engine with it")
            self._on_dead(error)
            self._live.give_up(error)
            self._recorder.flush()

    def _on_dead(self, error: EngineDeadError) -> None:
        if self._model_config is None:
            error = EngineStartupError(*error.args)  # `wait_until_ready` raises it: no need to log
        elif not self._is_closed:
            logger.error("the engine is dead: %s", error)
        self._life.die(error)
        self._utilities.fail_all(error)
        self._kv_events.fail(error)
        self._has_ready_message.set()
        self._settled.set()

    def _on_request_gone(self) -> None:
        if not len(self._live):
            self._idle_waiters.unpark_all()

    def _check_ready(self) -> None:
        if self._life.dead_error is not None or self._model_config is None:
            raise self._life.not_ready()
