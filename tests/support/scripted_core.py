"""A core client without an engine: a test says what the engine says, and sees what it is sent."""

from __future__ import annotations

import math

import trio

from trio_llm.errors import EngineDeadError
from trio_llm.wire.codec import encode
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["ScriptedCore"]


class ScriptedCore:
    """Implements `CoreClient`, and `EngineLink` for the one engine."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.is_up = True
        self.sent: list[ToEngine] = []
        self.kill_reason: str | None = None
        self._send, self._receive = trio.open_memory_channel[list[FromEngine]](math.inf)

    @property
    def is_dead(self) -> bool:
        return self.kill_reason is not None

    def can_run(self, *, has_begun: bool) -> bool:
        return True

    async def run(self) -> None:
        await trio.sleep_forever()

    def send_nowait(self, message: ToEngine) -> None:
        encode(message)  # raises what the real one raises
        self.sent.append(message)

    async def receive(self) -> list[FromEngine]:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise EngineDeadError(str(self.kill_reason)) from None

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        if self.kill_reason is None:
            self.kill_reason = reason
        self._send.close()

    def say(self, *messages: FromEngine) -> None:
        """Let the engine say these, to be taken together."""
        self._send.send_nowait(list(messages))
