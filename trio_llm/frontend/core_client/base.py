"""CoreClient: the interface to one engine, independent of the transport.

Implemented by `OneEngineClient` over zmq and processes, and in memory for tests and FakeLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["CoreClient", "EngineLost"]


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An incarnation of the engine is dead. All its messages were taken before, and another one will be started."""

    epoch: int
    """The epoch of the dead incarnation."""
    reason: str


class CoreClient(Protocol):
    """A pair of queues to and from an engine, and the tasks that keep them moving."""

    async def run(self) -> None:
        """Own the engine: start it, move messages, report its end. Never returns; cancel it to stop the engine.

        Cancellation: the engine is stopped before this returns, within a few seconds.
        """
        ...

    def send_nowait(self, message: ToEngine) -> None:
        """Queue one message. Synchronous, so that it works in a task that is cancelled already.

        Raises:
            CodecError: the message has no form on the wire. Nothing was queued.
        """
        ...

    async def receive(self) -> Sequence[FromEngine | EngineLost]:
        """Take all messages that have come, waiting for the first. For one task.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            EngineDeadError: the engine is gone for good, and all it sent was taken before.
        """
        ...

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        """End the engine now, because of a fault that it cannot know. `receive` reports it, with this reason.

        Args:
            for_good: do not start another engine: it would have the same fault.
        """
        ...
