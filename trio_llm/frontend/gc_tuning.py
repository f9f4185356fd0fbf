"""tune_gc: settings of the cyclic garbage collector for a process that serves many streams. Used by `trio-llm serve`.

Each token makes some objects that live until its reader has run, so that a batch of a few hundred streams crosses the
collector's default threshold at every few tokens, and the oldest generation is everything that was ever imported.
"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["tune_gc"]

_THRESHOLDS: Final = (10_000, 20, 50)


def tune_gc() -> None:
    """Leave all objects that exist now out of later collections, and collect younger ones less often.

    For the whole process; call it when all is loaded. Nothing here relies on the collector to free memory: what a
    request leaves behind has no cycles (`tests/frontend/http/server/test_memory.py`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
