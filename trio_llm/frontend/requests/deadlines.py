"""Deadlines of readers, as the engine gets them: seconds left, since clocks do not cross processes.

Used where requests are sent.
"""

from __future__ import annotations

import math

import trio

__all__ = ["seconds_left"]


def seconds_left() -> float | None:
    """What the cancel scopes around the caller leave it, 0 if nothing; None: they have no deadline."""
    deadline = trio.current_effective_deadline()
    return None if deadline == math.inf else max(0.0, deadline - trio.current_time())
