"""InMemoryCoreClient: the real EngineCore as a task of the same Trio program, in place of a process behind zmq.

For tests: every frame goes through the real codec, time is Trio's clock (a MockClock works), and faults can be set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import trio

from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.base import Executor
from trio_llm.errors import EngineDeadError
from trio_llm.wire.codec import decode_from_engine, decode_to_engine, encode
from trio_llm.wire.messages import EngineCoreOutputs, FromEngine, ToEngine

__all__ = ["InMemoryCoreClient"]


class InMemoryCoreClient:
    """Implements `CoreClient`.

    Args:
        executor: what runs the steps; a `FakeExecutor` for most tests.
        config: budget, sequences and credit.
        step_s: seconds of Trio's clock that each step takes; 0: a schedule point.
        epoch, engine_index: which incarnation of which engine this is.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        step_s: float = 0.0,
        epoch: int = 1,
        engine_index: int = 0,
    ) -> None:
        self.core = EngineCore(executor, config, epoch=epoch, engine_index=engine_index, clock=trio.current_time)
        self.step_s = step_s
        """May be changed at any time, for later steps."""
        self.on_sent: Callable[[ToEngine], None] = lambda message: None
        """Gets each message to the engine. Must not raise."""
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque([encode(self.core.ready())])
        self._has_input = trio.Event()
        self._has_output = trio.Event()
        self._has_output.set()
        self._dead_reason: str | None = None
        self._resumed = trio.Event()
        self._resumed.set()
        self._drops_next_tokens = False

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    async def run(self) -> None:
        try:
            while self._dead_reason is None:
                await self._turn()
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
        await trio.sleep_forever()

    def send_nowait(self, message: ToEngine) -> None:
        self._inbox.append(encode(message))
        self.on_sent(message)
        self._has_input.set()

    async def receive(self) -> list[FromEngine]:
        await self._has_output.wait()
        messages = [decode_from_engine(frame) for frame in self._outbox]
        self._outbox.clear()
        if not messages:
            assert self._dead_reason is not None
            raise EngineDeadError(self._dead_reason)
        if self._dead_reason is None:
            self._has_output = trio.Event()
        return messages

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        """End the engine. Messages that it has sent still arrive; a step in flight is lost."""
        if self._dead_reason is None:
            self._dead_reason = reason
        self._has_input.set()
        self._has_output.set()

    def pause(self) -> None:
        """Read no message and finish no step, like an engine that hangs."""
        if not self.is_paused:
            self._resumed = trio.Event()

    def resume(self) -> None:
        """Undo `pause`."""
        self._resumed.set()

    def inject(self, frame_of: FromEngine) -> None:
        """Put a message into the output path, as if the engine had sent it."""
        self._outbox.append(encode(frame_of))
        self._has_output.set()

    def drop_next_frame(self) -> None:
        """Lose the next message that has tokens or a vector."""
        self._drops_next_tokens = True

    async def _turn(self) -> None:
        if self.is_paused:
            await self._resumed.wait()
        while self._inbox:
            self.core.handle(decode_to_engine(self._inbox.popleft()))
        if answers := self.core.take_answers():
            await self._send([message for _, message in answers], after_s=0.0)
        if not self.core.is_busy:
            await self._wait_for_input()
            return
        await self._send([message for _, message in self.core.step()], after_s=self.step_s)

    async def _send(self, messages: list[FromEngine], *, after_s: float) -> None:
        """Let the messages arrive after `after_s` seconds, and not while the engine is paused."""
        await trio.sleep(after_s)
        if self.is_paused:
            await self._resumed.wait()
        for message in messages:
            if self._dead_reason is None and not self._is_lost(message):
                if isinstance(message, EngineCoreOutputs):  # the step is over now
                    message = msgspec.structs.replace(message, timestamp=trio.current_time())
                self._outbox.append(encode(message))
                self._has_output.set()

    async def _wait_for_input(self) -> None:
        if self._inbox:  # it came while answers were sent
            return
        self._has_input = trio.Event()
        with trio.move_on_at(self.core.heartbeat_due_s):
            await self._has_input.wait()
            return
        for _, heartbeat in self.core.take_heartbeats():
            if not self.is_paused and self._dead_reason is None:
                self.inject(heartbeat)

    def _is_lost(self, message: FromEngine) -> bool:
        if not (self._drops_next_tokens and isinstance(message, EngineCoreOutputs)):
            return False
        if not any(row.new_token_ids or row.pooled for row in message.outputs):
            return False
        self._drops_next_tokens = False
        return True
