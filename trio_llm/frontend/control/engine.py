"""Engine: one engine as the front end sees it, from its first start to the death of its last incarnation.

It owns what belongs to a single engine: the check of its messages' sequence and credit, the monitor, readiness, utility
calls and the control state. Listeners learn of its life. Made by `AsyncLLM`, one per engine index, and fed by the
output handler of that engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineStartupError
from trio_llm.frontend.control.monitor import EngineMonitor
from trio_llm.frontend.control.sequence import MessageSequence
from trio_llm.frontend.control.state import REPLAYED, ControlState
from trio_llm.frontend.control.utility_calls import UtilityCalls
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.wire.messages import (
    Ack,
    EngineCoreOutputs,
    FromEngine,
    Heartbeat,
    ModelConfig,
    Progress,
    Ready,
    ToEngine,
    UtilityCall,
    UtilityResult,
)

__all__ = ["Engine", "EngineListener", "SupervisedEngine", "find_alive"]

logger = logging.getLogger(__name__)

_PING_S: Final = 1.0
"""A busy engine may take longer to answer: then its steps say whether it is healthy."""


class EngineListener(Protocol):
    """Learns of an engine's life. Synchronous. `Engine.listeners` says in which order listeners are called."""

    def on_ready(self, engine: Engine) -> None:
        """An incarnation is ready: the first one, or one that follows a death (`engine.num_restarts` > 0)."""
        ...

    def on_lost(self, engine: Engine, reason: str) -> None:
        """An incarnation is dead, all it sent was delivered, and another one will be started."""
        ...

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """The last incarnation is dead, and all it sent was delivered. Called once."""
        ...


class Engine:
    """One engine.

    Args:
        index: of the engine among those of this owner, from 0.
        core: the way to it.
    """

    is_owned: ClassVar[bool] = True
    """This process starts it, and decides about its end."""

    def __init__(self, index: int, core: CoreClient, config: EngineConfig) -> None:
        self.index = index
        self.rank = config.first_rank + index
        """By which operators and clients know it. Its messages, and statistics of it, carry this number."""
        self.core = core
        self.monitor = EngineMonitor(config, self)
        self.utilities = UtilityCalls(self)
        self.listeners: Sequence[EngineListener] = ()
        """In the order in which they are called. Set by the owner."""
        self.count_unanswered: Callable[[], int] = lambda: 0
        """Requests that this engine has and owes an answer. Set by the owner."""
        self.control_state = ControlState()
        """What control calls have made of this engine. Replayed to each new incarnation."""
        self.num_control_calls = 0
        """Calls under way that may keep the engine's loop for as long as a start takes."""
        self.model: ModelConfig | None = None
        """As the newest incarnation described it; None until the first one is ready."""
        self.num_restarts = 0
        self._num_replayed = 0
        """Calls of the newest replay without an answer."""
        self._sequence = MessageSequence(ack_steps=max(1, config.credit_steps // 8))
        self._settled = trio.Event()
        """Ready or dead."""

    # -------------------------------------------------------------------------------------- sending

    def send_nowait(self, message: ToEngine) -> None:
        """Queue one message. Raises as `CoreClient.send_nowait`."""
        self.core.send_nowait(message)

    def kill(self, reason: str) -> None:
        """End this incarnation, because of a fault that it cannot know."""
        self.core.kill(reason)

    def acknowledge(self) -> None:
        """Give the engine credit for the messages that were taken, if enough have come together."""
        sequence = self._sequence
        if sequence.last_step - sequence.num_acknowledged >= sequence.ack_steps:
            sequence.num_acknowledged = sequence.last_step
            self.core.send_nowait(Ack(sequence.last_step))

    # -------------------------------------------------------------------------------------- state

    async def wait_settled(self) -> None:
        """Wait until the first incarnation is ready, or the last one dead. Cancellation: safe."""
        await self._settled.wait()

    @property
    def is_up(self) -> bool:
        """False from an incarnation's death until the next one is ready: nothing is sent meanwhile. Before the first
        one is ready it is True: what is sent waits in the core client's outbox."""
        return self.monitor.lost_reason is None and self.monitor.dead_error is None

    @property
    def is_dead(self) -> bool:
        """No other incarnation follows the last one."""
        return self.monitor.dead_error is not None

    @property
    def num_expected(self) -> int:
        """Requests that the engine owes an answer and may work for."""
        return 0 if self.control_state.is_held else self.count_unanswered()

    @property
    def is_under_control(self) -> bool:
        """A control call is under way, a replayed one included: the engine may be silent for as long as a start."""
        return self.num_control_calls > 0 or self._num_replayed > 0

    def can_run(self, *, has_begun: bool) -> bool:
        """The engine is free to work for a request.

        Args:
            has_begun: the request has tokens: a pause that waits lets it go on.
        """
        state = self.control_state
        return not state.is_held or (state.pause == "wait" and not state.is_asleep and has_begun)

    async def check_health(self) -> None:
        """Return if the engine answers, or if it is busy and its steps go on. Else wait for its answer.

        Cancellation: safe.

        Raises:
            EngineUnavailableError: the engine is dead, and another incarnation is started.
            EngineDeadError: the engine is gone.
        """
        if not self.is_up:
            raise self.monitor.not_ready()
        with trio.move_on_after(_PING_S):
            await self.utilities.call("ping", max_deaths=1)
            return
        if not self.num_expected or self.monitor.status().state != "ready":
            await self.utilities.call("ping", max_deaths=1)

    # -------------------------------------------------------------------------------------- receiving

    def take(self, message: FromEngine | EngineLost) -> EngineCoreOutputs | None:
        """Take one message: what concerns the engine itself is done here.

        Returns:
            Outputs whose rows are to be delivered. None: there are none, or they cannot be trusted.
        """
        match message:
            case EngineCoreOutputs():
                if not self._is_complete(message.step - 1):
                    return None
                self._sequence.last_step = max(self._sequence.last_step, message.step)
                for result in message.utility_results:
                    self._take_result(result)
                if message.outputs:
                    self.monitor.record_step()
                return message
            case Heartbeat():
                if self._is_complete(message.step) and self._sequence.count_executed(message.num_executed):
                    self.monitor.record_step()
            case Progress():
                self.monitor.progress = message
            case Ready():
                self._begin(message.model)
            case EngineLost():
                self._lose(message.reason)
            case _:
                pass  # EngineDead: the core client has read it.
        return None

    def distrust(self, reason: str) -> None:
        """Ignore the rest of this incarnation's messages, of which one is missing, and end it."""
        self._sequence.is_trusted = False
        self.core.kill(reason)

    def die(self, error: EngineDeadError) -> None:
        """The last incarnation is dead. Does nothing if that is known."""
        if not self.is_dead:
            if self.monitor.is_ready:
                logger.error("engine %d is dead: %s", self.rank, error)
            self._end(error)

    def close(self, error: EngineDeadError) -> None:
        """As `die`, for an engine that its owner stops: nothing is logged."""
        if not self.is_dead:
            self._end(error)

    def _is_complete(self, step: int) -> bool:
        """All messages up to this step were taken. If one is missing, a token may be, and the engine is ended."""
        sequence = self._sequence
        if step > sequence.last_step and sequence.is_trusted:
            self.distrust(f"message {sequence.last_step + 1} of the engine was lost")
        return sequence.is_trusted

    def _begin(self, model: ModelConfig) -> None:
        """An incarnation is ready."""
        self._sequence.restart()
        if self.model is None:
            self._settled.set()
        elif model.logits_width != self.model.logits_width:
            self.core.kill("another model was found where the engine's was: requests cannot go on with that")
            return
        else:
            self.num_restarts += 1
        self.model = model
        self.monitor.mark_ready()
        # The control state comes before any request. Calls that wait come after: one may ask for the end of what runs.
        replay = self._make_replay()
        self._num_replayed = len(replay)
        for call in replay:
            self.core.send_nowait(call)
        for listener in self.listeners:
            listener.on_ready(self)
        self.utilities.resend()

    def _make_replay(self) -> list[UtilityCall]:
        return self.control_state.replay()

    def _lose(self, reason: str) -> None:
        self._num_replayed = 0
        self.monitor.mark_lost(reason)
        self.utilities.on_engine_lost(reason)
        for listener in self.listeners:
            listener.on_lost(self, reason)

    def _end(self, error: EngineDeadError) -> None:
        if not self.monitor.is_ready:
            error = EngineStartupError(*error.args)  # `wait_until_ready` raises it
        self.monitor.mark_dead(error)
        self.utilities.fail_all(error)
        for listener in self.listeners:
            listener.on_dead(self, error)
        self._settled.set()

    def _take_result(self, result: UtilityResult) -> None:
        if result.call_id != REPLAYED:
            self.utilities.resolve(result)
            return
        self._num_replayed -= 1
        if result.error is not None:
            # Requests must not go on with, say, other weights than they began with.
            self.core.kill(f"a new engine could not be brought to where the dead one was: {result.error}")


class SupervisedEngine(Engine):
    """An engine that a supervisor owns. The supervisor brings each incarnation to where the one before was."""

    is_owned = False

    def _make_replay(self) -> list[UtilityCall]:
        return []


def find_alive(engines: Sequence[Engine]) -> list[Engine]:
    """The engines that live or are started again. All of them, if each one is dead for good: their errors say why."""
    return [engine for engine in engines if not engine.is_dead] or list(engines)
