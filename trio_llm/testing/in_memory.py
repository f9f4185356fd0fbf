"""InMemoryCoreClient: the real EngineCore as a task of the same Trio program, in place of a process behind zmq.

For tests: every frame goes through the real codec, time is Trio's clock (a MockClock works), and faults can be put in.
"""

from __future__ import annotations

from collections import deque

import trio

from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.base import Executor
from trio_llm.errors import EngineDeadError
from trio_llm.wire.codec import decode_from_engine, decode_to_engine, encode
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["InMemoryCoreClient"]

_EPOCH = 1


class InMemoryCoreClient:
    """Implements `CoreClient`.

    Args:
        executor: what runs the steps; a `FakeExecutor` for most tests.
        config: budget, sequences and credit.
        step_s: seconds of Trio's clock that each step takes; 0: a schedule point.
    """

    def __init__(self, executor: Executor, config: EngineConfig, *, step_s: float = 0.0) -> None:
        self.core = EngineCore(executor, config, epoch=_EPOCH)
        self._step_s = step_s
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque([encode(self.core.ready())])
        self._has_input = trio.Event()
        self._has_output = trio.Event()
        self._has_output.set()
        self._dead_reason: str | None = None
        self._is_paused = False

    async def run(self) -> None:
        try:
            while self._dead_reason is None:
                await self._turn()
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
        await trio.sleep_forever()

    def send_nowait(self, message: ToEngine) -> None:
        self._inbox.append(encode(message))
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

    def kill(self, reason: str) -> None:
        if self._dead_reason is None:
            self._dead_reason = reason
        self._has_input.set()
        self._has_output.set()

    def pause(self) -> None:
        """Take no step and read no message, as an engine that hangs."""
        self._is_paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_paused = False
        self._has_input.set()

    def inject(self, frame_of: FromEngine) -> None:
        """Put a message into the output path, as if the engine had sent it."""
        self._outbox.append(encode(frame_of))
        self._has_output.set()

    async def _turn(self) -> None:
        while self._inbox and not self._is_paused:
            self.core.handle(decode_to_engine(self._inbox.popleft()), trio.current_time())
        if self._is_paused or not self.core.is_busy:
            self._has_input = trio.Event()
            await self._has_input.wait()
            return
        outputs = self.core.step(trio.current_time())
        if outputs is not None:
            self._outbox.append(encode(outputs))
            self._has_output.set()
        await trio.sleep(self._step_s)
