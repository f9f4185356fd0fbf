"""SupervisorLink: the supervisor as a front end sees it. Engines and control calls are on its other side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

import trio

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.control.engine_control import Answer
from trio_llm.frontend.core_client.attached_engine import AttachedEngine
from trio_llm.frontend.core_client.base import EngineLost
from trio_llm.frontend.statistics.metric_counts import MetricsSnapshot
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.supervisor.channel import Channel
from trio_llm.supervisor.errors import make_error
from trio_llm.supervisor.messages import (
    AskMetrics,
    Boot,
    ControlAnswer,
    ControlCall,
    EngineAddresses,
    EngineDied,
    EngineLostNotice,
    EngineProgress,
    EngineStates,
    KillEngine,
    Listening,
    Metrics,
    MetricsOfOthers,
    ReportMetrics,
    Serving,
    Stop,
    ToFrontEnd,
)
from trio_llm.wire.messages import PlainValue

__all__ = ["SupervisorLink"]


REPORT_S: Final = 2.0
"""Time between two reports of what is counted: so much of it is lost with a front end that is killed."""

_ReplyT = TypeVar("_ReplyT", ControlAnswer, MetricsOfOthers)


@dataclass(slots=True, eq=False)
class _WaitingCall:
    done: trio.Event
    reply: ControlAnswer | MetricsOfOthers | None = None


class SupervisorLink:
    """Made with the first message of the supervisor. `run` takes the others.

    Raises:
        EngineStartupError: the sockets for the engines cannot be made.
    """

    def __init__(self, channel: Channel[ToFrontEnd], boot: Boot, metrics: PrometheusStatLogger) -> None:
        self._channel = channel
        self.stop = trio.Event()
        """The supervisor wants this front end to drain and end."""
        rank = boot.engine.first_rank
        self.cores = [AttachedEngine(rank + index, _Kill(channel, index)) for index in range(boot.num_engines)]
        self._engines: Sequence[Engine] = ()
        self._metrics = metrics
        self._is_serving = False
        """Before that it does not know the model that its histograms are for, and sends none."""
        self._calls: dict[int, _WaitingCall] = {}
        self._numbers = count(1)

    async def run(self, engines: Sequence[Engine]) -> None:
        """Let the engines connect, and take messages until the supervisor is gone.

        Args:
            engines: what was made of `cores`.

        Cancellation: safe.

        Raises:
            CodecError: what came is no message.
        """
        self._engines = engines
        addresses = [
            EngineAddresses(input_address=core.sockets.input_address, output_address=core.sockets.output_address)
            for core in self.cores
        ]
        self._channel.send_nowait(Listening(addresses=addresses))
        while (message := await self._channel.receive()) is not None:
            self._take(message)

    def report_serving(self) -> None:
        """All is loaded, and clients are answered from now on."""
        self._is_serving = True
        self._report(0)
        self._channel.send_nowait(Serving())

    async def make_call(self, method: str, args: tuple[PlainValue, ...]) -> list[Answer]:
        """Have a control call made by the supervisor, behind those of other front ends.

        Cancellation: the call is made all the same; its answer is dropped.

        Raises:
            TrioLLMError: as `EngineControl.call`.
        """
        call_id = next(self._numbers)
        message = ControlCall(call_id=call_id, method=method, args=list(args))
        answer = await self._ask(call_id, message, ControlAnswer)
        if answer.error is not None:
            raise make_error(answer)
        return answer.answers

    async def collect_metrics(self) -> Sequence[MetricsSnapshot]:
        """What the other front ends have counted. The supervisor asks them for half a second at most.

        Cancellation: safe.
        """
        call_id = next(self._numbers)
        return (await self._ask(call_id, AskMetrics(call_id=call_id), MetricsOfOthers)).snapshots

    async def report_metrics(self) -> None:
        """Send what is counted here, now and then. Returns never. Cancellation: safe."""
        while True:
            await trio.sleep(REPORT_S)
            self._report(0)

    def _report(self, call_id: int) -> None:
        if self._is_serving:
            self._channel.send_nowait(Metrics(call_id=call_id, snapshot=self._metrics.snapshot()))

    async def _ask(self, call_id: int, message: ControlCall | AskMetrics, reply_type: type[_ReplyT]) -> _ReplyT:
        """Send a message, and wait for the reply with its number. Cancellation: the reply is dropped."""
        self._channel.send_nowait(message)
        waiting = self._calls[call_id] = _WaitingCall(trio.Event())
        try:
            await waiting.done.wait()
        finally:
            del self._calls[call_id]
        assert isinstance(waiting.reply, reply_type)
        return waiting.reply

    def _take(self, message: ToFrontEnd) -> None:
        match message:
            case EngineProgress():
                monitor = self._engines[message.engine_index].monitor
                monitor.progress = message.progress
                monitor.record_life()
            case EngineLostNotice():
                self.cores[message.engine_index].announce_loss(EngineLost(message.epoch, message.reason))
            case EngineDied():
                self.cores[message.engine_index].announce_death(EngineDeadError(message.reason))
            case EngineStates():
                for engine, state in zip(self._engines, message.states, strict=True):
                    engine.control_state = state
                    engine.num_control_calls = message.num_calls
            case ControlAnswer() | MetricsOfOthers():
                if waiting := self._calls.get(message.call_id):
                    waiting.reply = message
                    waiting.done.set()
            case ReportMetrics():
                self._report(message.call_id)
            case Stop():
                self.stop.set()
            case Boot():
                pass  # the first message, which came already


@dataclass(frozen=True, slots=True)
class _Kill:
    """Asks the supervisor to end an incarnation of one engine; called by its `AttachedEngine`."""

    channel: Channel[ToFrontEnd]
    engine_index: int

    def __call__(self, epoch: int, reason: str) -> None:
        self.channel.send_nowait(KillEngine(engine_index=self.engine_index, epoch=epoch, reason=reason))
