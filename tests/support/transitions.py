"""draw_transitions: a table of states and those that may follow, as the pages in docs/ show it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import TypeVar

__all__ = ["draw_transitions"]

_StateT = TypeVar("_StateT", bound=enum.Enum)


def draw_transitions(states: type[_StateT], transitions: Mapping[_StateT, Collection[_StateT]]) -> str:
    """One row per state, with the states that may follow."""
    rows = [["from \\ to", *(state.name for state in states)]]
    for old in states:
        rows.append([old.name, *("yes" if new in transitions[old] else "." for new in states)])
    return "\n".join(
        "".join(f"{cell:10}" if i else f"{cell:12}" for i, cell in enumerate(row)).rstrip() for row in rows
    )
