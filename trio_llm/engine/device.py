"""Terms about the device that models, workers and executors share: where weights are, loading progress, and its loss.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

__all__ = ["DeviceLostError", "ProgressCallback", "WeightsLocation"]

ProgressCallback = Callable[[str, int, int], None]
"""Called with (phase, done, total) while a model loads; a total of 0 is unknown."""


class WeightsLocation(enum.Enum):
    """Where the weights are. On a CPU, `DEVICE` and `HOST` are the same memory."""

    DEVICE = "device"
    HOST = "host"
    DROPPED = "dropped"


class DeviceLostError(Exception):
    """The content of the device is unknown: the engine must end, even if only a control call has failed."""
