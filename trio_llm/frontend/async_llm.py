"""AsyncLLM: engines as one object in a Trio program. `open_llm()` is the way to get one.

Implements `EngineClient` over one `Engine` per core client. The nursery of its tasks is held by `open_llm`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import (
    EngineDeadError,
    EngineUnavailableError,
    NotSupportedError,
)
from trio_llm.frontend.control.calls import ControlCalls
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.control.engine_control import MakeCall
from trio_llm.frontend.control.engine_group import EngineGroup
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.kv_events import KVEventBatches, KVEventHub
from trio_llm.frontend.library.library import LibraryCalls
from trio_llm.frontend.loaded_model import LoadedModel, describe_model, load_model
from trio_llm.frontend.output_handler import OutputHandler
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits, LoadOfOthers
from trio_llm.frontend.requests.balancing import Balancer
from trio_llm.frontend.requests.input_processor import InputProcessor
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.requests.submitter import RequestCalls, RequestSubmitter
from trio_llm.frontend.statistics.loggers import open_recorder
from trio_llm.frontend.statistics.stats import StatLoggerSource
from trio_llm.frontend.statistics.totals import EngineStatistics
from trio_llm.frontend.tracing.observers import open_observers
from trio_llm.wire.messages import ModelConfig

__all__ = ["AsyncLLM"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S: Final = 10.0


class AsyncLLM(RequestCalls, ControlCalls, LibraryCalls):
    """Engines in this process' care. Made by `open_llm()` only.

    Args:
        cores: the ways to the engines, at least one; all run the same model.
        make_call, load_of_others, balancer: as `EngineGroup`, `AdmissionLedger` and `RequestRegistry`, for one of
            several front ends.
    """

    def __init__(
        self,
        cores: Sequence[CoreClient],
        config: EngineConfig,
        stat_loggers: Sequence[StatLoggerSource],
        *,
        keep_alive_on_engine_death: bool,
        make_call: MakeCall | None = None,
        load_of_others: LoadOfOthers | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        self.config = config
        self._keep_alive = keep_alive_on_engine_death
        self._group = EngineGroup(cores, config, self._check_ready, make_call=make_call)
        self._engines = self._group.engines
        self._recorder = open_recorder(config, stat_loggers, num_engines=len(cores))
        ledger = AdmissionLedger(AdmissionLimits.of(config), self._recorder.rejection, others=load_of_others)
        balancer = balancer or Balancer.of(config, num_engines=len(cores))
        self._registry = RequestRegistry(self._engines, self._recorder, ledger, balancer=balancer)
        self._submitter = RequestSubmitter(self, self._registry, open_observers(config))
        self._control = self._group.control
        self._control.observe = self._recorder.operation
        self._kv_events = KVEventHub(len(cores))
        self._model: LoadedModel | None = None
        self._settled = trio.Event()
        """The model is loaded, or all engines are dead."""
        # The order in which they hear of an engine: requests are sent when all else is up to date.
        self._group.listen(self._recorder, self._submitter.observers, self, self._kv_events, self._registry.recovery)
        for engine in self._engines:
            engine.count_unanswered = partial(self._registry.num_expected, engine.index)

    # -------------------------------------------------------------------------------- what is loaded

    @property
    def model_config(self) -> ModelConfig:
        return self._get_model().config

    @property
    def renderer(self) -> Renderer:
        return self._get_model().renderer

    @property
    def input_processor(self) -> InputProcessor:
        return self._get_model().input_processor

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.model_config.tasks

    def _get_model(self) -> LoadedModel:
        if self._model is None:
            raise self._group.make_not_ready_error()
        return self._model

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines, for the owner of this object."""
        return self._engines

    # -------------------------------------------------------------------------------------- requests

    def check_admission(self) -> None:
        self.check_accepting()
        self._registry.check_admission()

    def check_accepting(self) -> None:
        """Raise what `check_admission` raises, whatever the load is."""
        if self._submitter.is_draining and self.dead_error is None:
            raise EngineUnavailableError("the server is shutting down and takes no new requests")
        self._check_ready()
        self._control.check_awake()

    # ----------------------------------------------------------------------------------------- state

    @property
    def status(self) -> EngineStatus:
        status = self._group.status
        if self._submitter.is_draining and status.state != "dead":
            return EngineStatus(state="draining", elapsed_s=status.elapsed_s)
        return status

    @property
    def is_running(self) -> bool:
        return self.status.state == "ready"

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._group.dead_error

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
        return await self._group.wait_dead()

    async def check_health(self) -> None:
        await trio.lowlevel.checkpoint()
        self._check_ready()
        await self._control.check_health()

    def statistics(self) -> EngineStatistics:
        num_blocks = [0 if engine.model is None else engine.model.num_blocks for engine in self._engines]
        return self._recorder.snapshot(self.status.state, num_blocks=num_blocks)

    def kv_events(self, *, max_unread: int = 1024) -> AbstractAsyncContextManager[KVEventBatches]:
        if not self.config.kv_events:
            raise NotSupportedError("this engine sends no KV events; set EngineConfig(kv_events=True)")
        return self._kv_events.subscribe(max_unread)

    def do_log_stats(self) -> None:
        self._recorder.log()

    def _check_ready(self) -> None:
        if self.dead_error is not None or self._model is None:
            raise self._group.make_not_ready_error()

    # ----------------------------------------------------------------------------------------- tasks

    async def _run(self, nursery: trio.Nursery) -> None:
        self._submitter.nursery = nursery
        self._group.start(nursery, self._handle_outputs)
        if self._recorder.is_enabled:
            nursery.start_soon(self._log_statistics)
        await self._load_model()

    async def _handle_outputs(self, engine: Engine) -> None:
        chunk_size = self.config.output_proc_chunk_size
        await OutputHandler(engine, self._registry, self._recorder, self._kv_events, chunk_size).run()

    async def _load_model(self) -> None:
        self._model = await load_model(self._engines, self._load_renderer)
        if self._model is not None:
            self._registry.processor = OutputProcessor(self._model.renderer.token_table)
            for engine in self._engines:
                engine.monitor.is_ready = True
            self._settled.set()

    async def _load_renderer(self, model: ModelConfig) -> Renderer:
        load = partial(Renderer.load, Path(model.model_dir), model.max_model_len, logits_width=model.logits_width)
        return await trio.to_thread.run_sync(load)

    async def _log_statistics(self) -> None:
        while True:
            await trio.sleep(_LOG_INTERVAL_S)
            self._recorder.log()

    def _close(self) -> None:
        """The block of `open_llm` is left: no caller waits for an answer any more. Synchronous."""
        self._group.close(EngineDeadError("the block of open_llm() was left, and the engine with it"))
        self._recorder.flush()

    # ------------------------------------------------------------------------- as an EngineListener

    def on_ready(self, engine: Engine) -> None:
        """Take over what another incarnation says about the model."""
        if engine.num_restarts == 0:
            return
        if self._model is not None:  # else the tokenizer is still being loaded
            config = describe_model(self._engines)
            self._model = replace(self._model, config=config, input_processor=InputProcessor(config))
        num_requests = self._registry.num_in_flight(engine.index)
        logger.warning("engine %d is ready again and goes on with %d requests", engine.rank, num_requests)

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing: requests go on with another engine, or wait for the next incarnation."""

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Let waiting callers look at what is left."""
        if self.dead_error is not None:
            self._settled.set()
