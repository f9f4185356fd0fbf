"""MessageSequence: which messages of an engine's incarnation were taken, and when the engine gets credit for them.

Pure. Used by `Engine`, once per message.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MessageSequence"]


@dataclass(slots=True)
class MessageSequence:
    """The count of one incarnation's messages.

    Args:
        ack_steps: messages between two acknowledgements; at least 1.
    """

    ack_steps: int
    last_step: int = 0
    """Number of the newest message that was taken; messages count from 1."""
    num_executed: int = 0
    """Steps that the engine has computed, as far as it has said so."""
    num_acknowledged: int = 0
    is_trusted: bool = True
    """False: a message is missing, and what comes after it is of no use."""

    def restart(self) -> None:
        """Another incarnation counts from the beginning."""
        self.last_step = self.num_executed = self.num_acknowledged = 0
        self.is_trusted = True

    def count_executed(self, num_executed: int) -> bool:
        """Note what a heartbeat says. Returns whether steps were computed since the one before."""
        has_grown = num_executed > self.num_executed
        self.num_executed = max(self.num_executed, num_executed)
        return has_grown
