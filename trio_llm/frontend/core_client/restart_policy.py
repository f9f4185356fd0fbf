"""RestartPolicy: whether a dead engine is started again, and after how long.

Pure. Used by `RestartingClient`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["RestartPolicy"]

WINDOW_S: Final = 600.0
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 8.0


class RestartPolicy:
    """At most `max_restarts` in ten minutes, the first after half a second, each further one after twice as long, up to
    eight seconds.

    Args:
        is_first_at_once: the first one comes without a delay.
    """

    def __init__(self, max_restarts: int, *, is_first_at_once: bool = False) -> None:
        self._max_restarts = max_restarts
        self._is_first_at_once = is_first_at_once
        self._restarts_s: deque[float] = deque()
        """Times of the restarts within the window."""

    @property
    def max_restarts(self) -> int:
        return self._max_restarts

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds until what has died now is started again; None: it is not."""
        while self._restarts_s and now_s - self._restarts_s[0] >= WINDOW_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self._max_restarts:
            return None
        num_before = len(self._restarts_s) - self._is_first_at_once
        delay_s = 0.0 if num_before < 0 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0**num_before)
        self._restarts_s.append(now_s)
        return delay_s
