"""RequestClock: when things happened to one request, and the times between them.

Pure. Kept by each registered request. The recorder sets the time of each token; the rest is set once per request.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestClock"]


@dataclass(slots=True)
class RequestClock:
    """Trio's clock, seconds. The engine's clock is another one: it tells durations alone."""

    arrived_s: float
    submitted_s: float | None = None
    """When it was first sent, or would have been if an engine had been up."""
    sent_s: float = 0.0
    """When the engine that has it was sent it."""
    queue_time_s: float | None = None
    """As `FinishedRequestStats`; as the engine has told with the first token, like the next one."""
    prefill_time_s: float | None = None
    first_token_s: float | None = None
    """For a pooling request: when its vector came."""
    last_token_s: float = 0.0

    def mark_sent(self, now_s: float, *, is_up: bool) -> None:
        """The request goes to an engine, or waits for one to come up."""
        if self.submitted_s is None:
            self.submitted_s = now_s
        if is_up:
            self.sent_s = now_s

    def mark_first_token(self, now_s: float, *, queued_s: float | None, prefill_s: float | None) -> None:
        """The first token has come, or the vector.

        Args:
            queued_s, prefill_s: what the engine has measured; None: nothing.
        """
        self.first_token_s = self.last_token_s = now_s
        self.prefill_time_s = prefill_s
        if queued_s is not None and self.submitted_s is not None:
            self.queue_time_s = self.sent_s - self.submitted_s + queued_s

    @property
    def decode_time_s(self) -> float | None:
        return None if self.first_token_s is None else self.last_token_s - self.first_token_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s
