"""Words about the device that models, workers and executors share: where weights are, how far loading is, its loss.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

__all__ = ["DeviceLostError", "ProgressCallback", "WeightsLocation"]

ProgressCallback = Callable[[str, int, int], None]
"""(phase, done, total) while a model loads; total 0: not known."""


class WeightsLocation(enum.Enum):
    """Where the weights are. On a CPU, `DEVICE` and `HOST` are the same memory."""

    DEVICE = "device"
    HOST = "host"
    DROPPED = "dropped"


class DeviceLostError(Exception):
    """What is on the device is not known any more: the engine must end, even if only a control call had failed."""
