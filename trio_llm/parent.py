"""die_with_parent: ties the life of a process of ours to the one that started it. For engines and front ends."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, whatever else keeps it alive."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
