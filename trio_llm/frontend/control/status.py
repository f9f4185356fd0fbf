"""EngineStatus: what state the engine is in, for /health, progress bars and admission.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["EngineState", "EngineStatus", "pick_best"]

EngineState = Literal["loading", "ready", "recovering", "stalled", "asleep", "draining", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    state: EngineState
    phase: str | None = None
    """While loading or recovering: starting, convert, load, warm-up, tokenizer."""
    done: int = 0
    total: int = 0
    """How far the phase is; total 0: not known."""
    elapsed_s: float = 0.0
    """Since the engine was started, or started again."""
    reason: str | None = None
    """Why it is dead, stalled, recovering or asleep: the root cause as text."""


_BEST_FIRST: Final[tuple[EngineState, ...]] = (
    "ready",
    "asleep",
    "stalled",
    "recovering",
    "loading",
    "draining",
    "dead",
)


def pick_best(statuses: Iterable[EngineStatus]) -> EngineStatus:
    """What several engines are together: as ready as the best of them, since that one takes requests."""
    return min(statuses, key=lambda status: _BEST_FIRST.index(status.state))
