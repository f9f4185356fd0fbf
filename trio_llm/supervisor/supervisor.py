"""Supervisor: owns the engines and the front-end processes of one server, and starts again what dies.

It is the engines' client 0: it starts them, makes the control calls, and says which front ends they have. Requests go
between front ends and engines directly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import CodecError, EngineDeadError, EngineGenerateError, FrontEndDeadError, TrioLLMError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.control.engine_group import EngineGroup
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.supervisor.errors import make_error_answer
from trio_llm.supervisor.front_end_process import FRONT_END_COMMAND, FrontEndProcess
from trio_llm.supervisor.messages import (
    AskMetrics,
    Boot,
    ControlAnswer,
    ControlCall,
    EngineDied,
    EngineLostNotice,
    EngineProgress,
    EngineStates,
    FromFrontEnd,
    KillEngine,
    Listening,
    Metrics,
    MetricsOfOthers,
    Serving,
    ToFrontEnd,
)
from trio_llm.supervisor.metrics_exchange import MetricsExchange
from trio_llm.supervisor.shared_load import SharedLoad
from trio_llm.wire.messages import AttachClient, DetachClient, FromEngine, ModelConfig, Progress, Ready

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

MAX_FRONT_END_RESTARTS: Final = 5
"""Restarts of one front end within ten minutes; one more death ends the server."""
_LOG_INTERVAL_S: Final = 10.0
_DRAIN_GRACE_S: Final = 6.0
"""How long front ends may take to end after the drain, for last events and connections."""
_DEATH_GRACE_S: Final = 10.0
"""How long front ends may take to end by themselves once all engines are dead: they answer their clients first."""


class Supervisor:
    """`run` does it all. An `EngineListener`.

    Args:
        cores: the ways to the engines, which this process owns.
        listener_fds: descriptors of sockets that listen, which front ends inherit.
        load_fd: descriptor of the table that `SharedLoad` is about, with a place for each front end.
        command: the program of a front end; see `FrontEndProcess`.
    """

    def __init__(
        self,
        cores: Sequence[CoreClient],
        engine: EngineConfig,
        server: ServerConfig,
        *,
        listener_fds: Sequence[int],
        load_fd: int,
        log_level: str = "info",
        command: Sequence[str] = FRONT_END_COMMAND,
    ) -> None:
        self.group = EngineGroup(cores, engine, self._check_ready)
        self.group.listen(self)
        self._load = SharedLoad(load_fd)
        self._logs_stats = not engine.disable_log_stats
        self._drain_timeout_s = server.drain_timeout_s
        self._keeps_alive = server.keep_alive_on_engine_death
        self.front_ends = [
            FrontEndProcess(
                Boot(
                    engine=engine,
                    server=server,
                    num_engines=len(cores),
                    client_index=index,
                    listener_fds=list(listener_fds),
                    load_fd=load_fd,
                    log_level=log_level,
                ),
                self._take,
                command=command,
            )
            for index in range(1, server.api_server_count + 1)
        ]
        self._metrics = MetricsExchange(lambda index, message: self.front_ends[index - 1].send_nowait(message))
        self._settled = trio.Event()
        """All engines are ready for the first time, or all are dead."""
        self._epochs = [0] * len(cores)
        """The incarnation that runs, or ran last, by the index of the engine."""
        self._num_calls = 0
        """Control calls that are not over."""
        self._is_stopping = False
        self._nursery: trio.Nursery

    @property
    def status(self) -> EngineStatus:
        """What the engines are together."""
        return self.group.status

    @property
    def model(self) -> ModelConfig:
        """The model that the engines run. To be asked for once `wait_until_ready` has returned."""
        return next(engine.model for engine in self.group.engines if engine.model is not None)

    async def wait_until_ready(self) -> None:
        """Wait until all engines are ready and all front ends answer clients. Cancellation: safe.

        Raises:
            EngineStartupError: the engines ended before.
        """
        await self._settled.wait()
        self._check_ready()
        for front_end in self.front_ends:
            await front_end.is_serving.wait()

    async def run(self, stop: trio.Event) -> None:
        """Run engines and front ends until `stop` is set; then let the front ends drain, and end.

        Cancellation: all processes are ended before this returns, within a few seconds.

        Raises:
            EngineStartupError: an engine cannot be started.
            EngineDeadError: all engines are dead for good.
            FrontEndDeadError: a front end died too often.
        """
        with unwrap_single():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.group.start(nursery, self._drain_engine)
                nursery.start_soon(self._settle)
                if self._logs_stats:
                    nursery.start_soon(self._metrics.log, _LOG_INTERVAL_S)
                async with trio.open_nursery() as front_ends:
                    for front_end in self.front_ends:
                        front_ends.start_soon(self._keep, front_end, front_ends)
                    nursery.start_soon(self._stop_front_ends, stop, front_ends)
                dead_error = self.group.dead_error
                self.group.close(EngineDeadError("the server has stopped"))
                nursery.cancel_scope.cancel(reason="the front ends have ended")
        if dead_error is not None and not stop.is_set():
            raise dead_error

    # ------------------------------------------------------------------------------ front ends

    async def _keep(self, front_end: FrontEndProcess, nursery: trio.Nursery) -> None:
        """Run a front end, and start it again when it dies, until it has drained or the engines are dead."""
        policy = RestartPolicy(MAX_FRONT_END_RESTARTS, is_first_at_once=True)
        while True:
            try:
                reason = await front_end.run(partial(self._greet, front_end))
            except OSError as error:
                raise FrontEndDeadError(f"a front end cannot be started: {error}") from error
            finally:
                self._detach(front_end)
            if self._is_stopping or self.group.dead_error is not None:
                return
            delay_s = policy.next_delay_s(trio.current_time())
            if delay_s is None:
                raise FrontEndDeadError(
                    f"front end {front_end.index}: {reason}; it was started again {policy.max_restarts} times within "
                    "ten minutes"
                )
            logger.warning("front end %d has died and is started again in %g s: %s", front_end.index, delay_s, reason)
            await trio.sleep(delay_s)
            if self._is_stopping:
                return

    async def _stop_front_ends(self, stop: trio.Event, front_ends: trio.Nursery) -> None:
        """Let all front ends end when the server is to stop, or for good when there are no engines.

        One that stands still is ended by force, some time after the drain.
        """
        async with trio.open_nursery() as nursery:

            async def wait_dead() -> None:
                await self.group.wait_dead()
                if self._keeps_alive:
                    await trio.sleep_forever()
                await trio.sleep(_DEATH_GRACE_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait_dead)
            await stop.wait()
            nursery.cancel_scope.cancel()
        self._is_stopping = True
        for front_end in self.front_ends:
            front_end.order_stop()
        await trio.sleep(self._drain_timeout_s + _DRAIN_GRACE_S)
        logger.warning("some front ends have not ended, and are ended by force")
        front_ends.cancel_scope.cancel(reason="front ends have not ended in time")

    def _greet(self, front_end: FrontEndProcess) -> None:
        """Let a new incarnation know what has become of the engines."""
        front_end.send_nowait(self._states())
        for engine in self.group.engines:
            if engine.monitor.dead_error is not None:
                front_end.send_nowait(EngineDied(engine_index=engine.index, reason=str(engine.monitor.dead_error)))
        if self._is_stopping:
            front_end.order_stop()

    def _take(self, index: int, message: FromFrontEnd) -> None:
        front_end = self.front_ends[index - 1]
        match message:
            case Listening():
                for engine in self.group.engines:
                    self._attach(front_end, engine)
            case Serving():
                logger.info("front end %d answers clients", index)
            case KillEngine():
                self._kill(message)
            case Metrics():
                self._metrics.take(index, message)
            case AskMetrics():
                self._nursery.start_soon(self._send_metrics, front_end, front_end.epoch, message.call_id)
            case ControlCall():
                self._nursery.start_soon(self._make_call, front_end, front_end.epoch, message)
            case _:
                pass

    def _kill(self, message: KillEngine) -> None:
        engine = self.group.engines[message.engine_index]
        if message.epoch == self._epochs[engine.index] and not engine.is_dead:
            engine.core.kill(message.reason)

    async def _send_metrics(self, front_end: FrontEndProcess, epoch: int, call_id: int) -> None:
        snapshots = await self._metrics.collect(front_end.index)
        if front_end.epoch == epoch:
            self._answer(front_end, MetricsOfOthers(call_id=call_id, snapshots=snapshots))

    async def _make_call(self, front_end: FrontEndProcess, epoch: int, call: ControlCall) -> None:
        """Make a control call. It is made to its end, whatever becomes of the front end."""
        self._num_calls += 1
        self._broadcast(self._states())
        try:
            answers = await self.group.control.call(call.method, *call.args)
            answer = ControlAnswer(call_id=call.call_id, answers=answers)
        except TrioLLMError as error:
            answer = make_error_answer(call.call_id, error)
        self._num_calls -= 1
        self._broadcast(self._states())
        if front_end.epoch == epoch:
            self._answer(front_end, answer)

    def _answer(self, front_end: FrontEndProcess, answer: ControlAnswer | MetricsOfOthers) -> None:
        try:
            front_end.send_nowait(answer)
        except CodecError as error:  # it is too long: no other front end may suffer from that
            if isinstance(answer, ControlAnswer):
                front_end.send_nowait(make_error_answer(answer.call_id, EngineGenerateError(str(error))))
            else:
                front_end.send_nowait(MetricsOfOthers(call_id=answer.call_id, snapshots=[]))

    def _attach(self, front_end: FrontEndProcess, engine: Engine) -> None:
        """Let an engine connect to a front end, if both are there."""
        if front_end.addresses and engine.is_up and engine.model is not None:
            addresses = front_end.addresses[engine.index]
            engine.send_nowait(
                AttachClient(front_end.index, front_end.epoch, addresses.input_address, addresses.output_address)
            )

    def _detach(self, front_end: FrontEndProcess) -> None:
        """A front end has ended: the engines abort its requests, and none of them counts any more."""
        self._load.clear(front_end.index - 1)
        self._metrics.retire(front_end.index)
        for engine in self.group.engines:
            if engine.is_up and engine.model is not None:
                engine.send_nowait(DetachClient(front_end.index))

    def _broadcast(self, message: ToFrontEnd) -> None:
        for front_end in self.front_ends:
            front_end.send_nowait(message)

    def _states(self) -> EngineStates:
        states = [engine.control_state for engine in self.group.engines]
        return EngineStates(states=states, num_calls=self._num_calls)

    # --------------------------------------------------------------------------------- engines

    def _check_ready(self) -> None:
        if self.group.dead_error is not None or not self._settled.is_set():
            raise self.group.make_not_ready_error()

    async def _drain_engine(self, engine: Engine) -> None:
        """Take what an engine sends to its owner: no rows, since the owner has no requests."""
        while True:
            try:
                messages = await engine.core.receive()
            except EngineDeadError as error:
                engine.die(error)
                return
            engine.monitor.record_life()
            for message in messages:
                self._pass_on(engine, message)
                engine.take(message)
            engine.acknowledge()

    def _pass_on(self, engine: Engine, message: FromEngine | EngineLost) -> None:
        """Let the front ends know what they cannot see themselves."""
        match message:
            case Progress():
                self._broadcast(EngineProgress(engine_index=engine.index, progress=message))
            case EngineLost(epoch=epoch, reason=reason):
                self._broadcast(EngineLostNotice(engine_index=engine.index, epoch=epoch, reason=reason))
            case Ready():
                self._epochs[engine.index] = message.epoch
            case _:
                pass

    async def _settle(self) -> None:
        for engine in self.group.engines:
            await engine.wait_settled()
        if any(engine.is_dead for engine in self.group.engines):
            for engine in self.group.engines:  # one model cannot be served by half of its engines from the beginning
                engine.core.kill("another engine could not be started", for_good=True)
            await self.group.wait_dead()
        self._settled.set()

    # -------------------------------------------------------------------- as an EngineListener

    def on_ready(self, engine: Engine) -> None:
        """Connect an incarnation, which is in the state of the one before it, to all front ends."""
        engine.monitor.is_ready = True
        for front_end in self.front_ends:
            self._attach(front_end, engine)

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing: the front ends have been told of the incarnation."""

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Tell the front ends, which end the requests or move them."""
        self._broadcast(EngineDied(engine_index=engine.index, reason=str(error)))
