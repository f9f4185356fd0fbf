"""SupervisorLink: the supervisor as a front end sees it. Engines and control calls are on its other side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import trio

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.control.engine_control import Answer
from trio_llm.frontend.core_client.attached_engine import AttachedEngine
from trio_llm.frontend.core_client.base import EngineLost
from trio_llm.supervisor.channel import Channel
from trio_llm.supervisor.errors import make_error
from trio_llm.supervisor.messages import (
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
    Serving,
    Stop,
    ToFrontEnd,
)
from trio_llm.wire.messages import PlainValue

__all__ = ["SupervisorLink"]


@dataclass(slots=True, eq=False)
class _WaitingCall:
    done: trio.Event
    answer: ControlAnswer | None = None


class SupervisorLink:
    """Made with the first message of the supervisor. `run` takes the others.

    Raises:
        EngineStartupError: the sockets for the engines cannot be made.
    """

    def __init__(self, channel: Channel[ToFrontEnd], boot: Boot) -> None:
        self._channel = channel
        self.stop = trio.Event()
        """The supervisor wants this front end to drain and end."""
        self.cores = [AttachedEngine(index, _Kill(channel, index)) for index in range(boot.num_engines)]
        self._engines: Sequence[Engine] = ()
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
        self._channel.send_nowait(Serving())

    async def make_call(self, method: str, args: tuple[PlainValue, ...]) -> list[Answer]:
        """Have a control call made by the supervisor, behind those of other front ends.

        Cancellation: the call is made all the same; its answer is dropped.

        Raises:
            TrioLLMError: as `EngineControl.call`.
        """
        call_id = next(self._numbers)
        self._channel.send_nowait(ControlCall(call_id=call_id, method=method, args=list(args)))
        waiting = self._calls[call_id] = _WaitingCall(trio.Event())
        try:
            await waiting.done.wait()
        finally:
            del self._calls[call_id]
        answer = waiting.answer
        assert answer is not None
        if answer.error is not None:
            raise make_error(answer)
        return answer.answers

    def _take(self, message: ToFrontEnd) -> None:
        match message:
            case EngineProgress():
                self._engines[message.engine_index].monitor.progress = message.progress
            case EngineLostNotice():
                self.cores[message.engine_index].announce_loss(EngineLost(message.epoch, message.reason))
            case EngineDied():
                self.cores[message.engine_index].announce_death(EngineDeadError(message.reason))
            case EngineStates():
                for engine, state in zip(self._engines, message.states, strict=True):
                    engine.control_state = state
                    engine.num_control_calls = message.num_calls
            case ControlAnswer():
                if waiting := self._calls.get(message.call_id):
                    waiting.answer = message
                    waiting.done.set()
            case Stop():
                self.stop.set()
            case Boot():
                pass  # the first message, which came already


@dataclass(frozen=True, slots=True)
class _Kill:
    """Asks the supervisor to end an incarnation of one engine; called by its `AttachedEngine`."""

    channel: Channel[ToFrontEnd]
    engine_index: int

    def __call__(self, epoch: int, reason: str, for_good: bool) -> None:
        self.channel.send_nowait(
            KillEngine(engine_index=self.engine_index, epoch=epoch, reason=reason, for_good=for_good)
        )
