"""AsyncLLM: an engine as an object in a Trio program. `open_llm()` is the way to get one.

Implements `EngineClient` over a core client. The nursery of its tasks is held by `open_llm` (opening.py).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterable, Iterable, Sequence
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
    InvalidRequestError,
)
from trio_llm.frontend.admission import AdmissionLedger, AdmissionLimits
from trio_llm.frontend.control import ControlCalls, EngineControl
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.deadlines import seconds_left
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.input_processor import InputProcessor, check_priority, make_internal_id
from trio_llm.frontend.output_handler import LiveRequest, OutputHandler, OutputHandlerHooks
from trio_llm.frontend.output_processor import OutputProcessor
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.request_stream import GenerateStream
from trio_llm.frontend.sessions import Session, StreamingInput, check_session_params
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.statistics.stats import StatLogger
from trio_llm.frontend.statistics.totals import EngineStatistics, Totals
from trio_llm.frontend.status import EngineStatus
from trio_llm.frontend.utility_calls import UtilityCalls
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import ModelConfig, Progress, Ready

__all__ = ["AsyncLLM"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S: Final = 10.0
_MAX_REQUEST_ID_CHARS: Final = 256


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
        self._control = EngineControl(self._utilities, self._check_ready)
        self._handler = OutputHandler(
            core,
            self._recorder,
            OutputHandlerHooks(
                on_sign_of_life=self._on_sign_of_life,
                on_progress=self._on_progress,
                on_ready=self._on_ready,
                on_utility_result=self._utilities.resolve,
                on_dead=self._on_dead,
                on_request_gone=self._on_request_gone,
            ),
            ledger=self._ledger,
            ack_steps=max(1, config.credit_steps // 8),
        )
        self._started_s = self._last_life_s = trio.current_time()
        self._progress = Progress(0, "starting", 0, 0)
        self._ready_message: Ready | None = None
        self._has_ready_message = trio.Event()
        self._settled = trio.Event()
        """Ready or dead."""
        self._dead = trio.Event()
        self._nursery: trio.Nursery | None = None
        """Of `open_llm`, once its tasks run."""
        self._idle_waiters = trio.lowlevel.ParkingLot()
        self._dead_error: EngineDeadError | None = None
        self._is_draining = False
        self._is_closed = False
        self._model_config: ModelConfig | None = None
        self._renderer: Renderer | None = None
        self._input_processor: InputProcessor | None = None

    # -------------------------------------------------------------------------------- what is loaded

    @property
    def model_config(self) -> ModelConfig:
        if self._model_config is None:
            raise self._not_ready()
        return self._model_config

    @property
    def renderer(self) -> Renderer:
        if self._renderer is None:
            raise self._not_ready()
        return self._renderer

    @property
    def input_processor(self) -> InputProcessor:
        if self._input_processor is None:
            raise self._not_ready()
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
    ) -> GenerateStream:
        external_id = request_id if request_id is not None else uuid.uuid4().hex
        params = params if params is not None else SamplingParams()
        if not isinstance(prompt, str | list) and isinstance(prompt, AsyncIterable):
            admit = partial(self._admit_session, prompt, params, external_id, priority)
        else:
            admit = partial(self._admit, prompt, params, external_id, priority)
        return GenerateStream(external_id, admit, self._handler.leave, self._handler.resubmit)

    async def _admit(
        self, prompt: str | list[int], params: SamplingParams, external_id: str, priority: int
    ) -> LiveRequest:
        arrived_s = trio.current_time()
        _check_request_id(external_id)
        self.check_admission()
        token_ids = await self.renderer.render_prompt(prompt)
        bad_words = await self.renderer.render_bad_words(params.bad_words) if params.bad_words else []
        await trio.lowlevel.checkpoint()
        # The engine may have died while the text became tokens. From here on nothing waits: a request is either
        # registered and queued for sending, or nothing of it is left.
        self.check_admission()
        request = self.input_processor.process(
            token_ids,
            params,
            request_id=make_internal_id(external_id),
            priority=priority,
            deadline_s=seconds_left(),
            bad_words_token_ids=bad_words,
        )
        return self._handler.submit(request, external_id, arrived_s)

    async def _admit_session(
        self, inputs: AsyncIterable[StreamingInput], params: SamplingParams, external_id: str, priority: int
    ) -> LiveRequest:
        _check_request_id(external_id)
        check_priority(priority)
        check_session_params(params)
        await trio.lowlevel.checkpoint()
        self.check_admission()
        assert self._nursery is not None
        session = Session(
            inputs,
            params,
            external_id=external_id,
            priority=priority,
            renderer=self.renderer,
            input_processor=self.input_processor,
            handler=self._handler,
        )
        self._nursery.start_soon(session.run)
        return session.request

    def abort(self, request_ids: str | Iterable[str]) -> int:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return sum(self._handler.abort(request_id) for request_id in ids)

    def check_admission(self) -> None:
        if self._is_draining and self._dead_error is None:
            raise EngineUnavailableError("the server is shutting down and takes no new requests")
        self._check_ready()
        self._control.check_awake()
        self._ledger.check()

    # ----------------------------------------------------------------------------------------- state

    @property
    def status(self) -> EngineStatus:
        elapsed_s = trio.current_time() - self._started_s
        if self._dead_error is not None:
            return EngineStatus(state="dead", reason=str(self._dead_error), elapsed_s=elapsed_s)
        if self._is_draining:
            return EngineStatus(state="draining", elapsed_s=elapsed_s)
        if self._model_config is None:
            progress = self._progress
            return EngineStatus(
                state="loading", phase=progress.phase, done=progress.done, total=progress.total, elapsed_s=elapsed_s
            )
        return EngineStatus(state="ready", elapsed_s=elapsed_s)

    @property
    def is_running(self) -> bool:
        return self.status.state == "ready"

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead_error

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
        await self._dead.wait()
        assert self._dead_error is not None
        return self._dead_error

    async def check_health(self) -> None:
        self._check_ready()
        await self._utilities.call("ping")

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

    async def wait_idle(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._handler.num_unfinished:
            await self._idle_waiters.park()

    def statistics(self) -> EngineStatistics:
        model = self._model_config
        return self._totals.snapshot(self.status.state, num_blocks=0 if model is None else model.num_blocks)

    def do_log_stats(self) -> None:
        self._recorder.log()

    # ----------------------------------------------------------------------------------------- tasks

    async def _run(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        nursery.start_soon(self._core.run)
        nursery.start_soon(self._handler.run)
        nursery.start_soon(self._control.run)
        nursery.start_soon(self._log_statistics)
        await self._start_up()

    async def _start_up(self) -> None:
        """Watch the engine until its `Ready`, then load the tokenizer that belongs to its weights."""
        timeout_s = self.config.startup_timeout_s
        while not self._has_ready_message.is_set() and self._dead_error is None:
            left_s = self._last_life_s + timeout_s - trio.current_time()
            if left_s <= 0:
                self._core.kill(
                    f"the engine gave no sign of life for {timeout_s:g} s in phase {self._progress.phase!r}"
                )
                return
            with trio.move_on_after(left_s):
                await self._has_ready_message.wait()
        if self._ready_message is None:
            return
        model = self._ready_message.model
        self._progress = Progress(0, "tokenizer", 0, 0)
        try:
            renderer = await self._load_renderer(model)
        except EngineStartupError as error:
            self._core.kill(str(error))
            return
        self._handler.processor = OutputProcessor(renderer.token_table)
        self._renderer = renderer
        self._input_processor = InputProcessor(model)
        self._model_config = model
        self._settled.set()

    async def _load_renderer(self, model: ModelConfig) -> Renderer:
        load = partial(Renderer.load, Path(model.model_dir), model.max_model_len, logits_width=model.logits_width)
        return await trio.to_thread.run_sync(load)

    async def _log_statistics(self) -> None:
        while True:
            await trio.sleep(_LOG_INTERVAL_S)
            self._recorder.log()

    # ----------------------------------------------------------------------------------------- hooks

    def _on_sign_of_life(self) -> None:
        self._last_life_s = trio.current_time()

    def _on_progress(self, progress: Progress) -> None:
        self._progress = progress

    def _on_ready(self, ready: Ready) -> None:
        self._ready_message = ready
        self._has_ready_message.set()

    def _close(self) -> None:
        """The block of `open_llm` is left: nobody waits for an answer any more. Synchronous."""
        if self._dead_error is None:
            self._is_closed = True
            self._handler.give_up(EngineDeadError("the block of open_llm() was left, and the engine with it"))

    def _on_dead(self, error: EngineDeadError) -> None:
        if self._model_config is None:
            self._dead_error = EngineStartupError(*error.args)  # `wait_until_ready` raises it: no need to log
        else:
            self._dead_error = error
            if not self._is_closed:
                logger.error("the engine is dead: %s", error)
        self._utilities.fail_all(error)
        self._has_ready_message.set()
        self._settled.set()
        self._dead.set()

    def _on_request_gone(self) -> None:
        if not self._handler.num_unfinished:
            self._idle_waiters.unpark_all()

    def _check_ready(self) -> None:
        if self._dead_error is not None or self._model_config is None:
            raise self._not_ready()

    def _not_ready(self) -> EngineDeadError | EngineUnavailableError:
        if self._dead_error is not None:
            return type(self._dead_error)(*self._dead_error.args)
        progress = self._progress
        how_far = f", {progress.done} of {progress.total}" if progress.total else ""
        return EngineUnavailableError(f"the model is still loading (phase {progress.phase}{how_far})")


def _check_request_id(external_id: str) -> None:
    if not isinstance(external_id, str) or not 1 <= len(external_id) <= _MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id must be a string of 1 to {_MAX_REQUEST_ID_CHARS} characters", "request_id"
        )
