"""The death matrix: what must become of everybody when a process dies, by how it dies and what it is doing.

Pure. `test_deaths.py` brings each death about and compares; `docs/recovery.md` shows the tables as they are rendered
here (`python -m tests.end_to_end.death_matrix` prints them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = [
    "ENGINE",
    "FAULTS",
    "FRONT_END",
    "MOMENTS",
    "REASONS",
    "EngineFate",
    "Fault",
    "FrontEndFate",
    "Moment",
    "render_engine",
    "render_front_end",
]

Fault = Literal["SIGKILL", "SIGSTOP", "exception", "exit 0"]
Moment = Literal["idle", "prefill", "decode", "draining", "asleep", "paused"]

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
MOMENTS: Final[tuple[Moment, ...]] = get_args(Moment)


@dataclass(frozen=True, slots=True)
class EngineFate:
    """After the death of an engine. Nothing of the dead one is left in any case: no process, file or block."""

    states: tuple[str, ...]
    """Of `/health`, in order, from the death on."""
    requests: str
    """What becomes of unfinished ones."""


@dataclass(frozen=True, slots=True)
class FrontEndFate:
    """After the death of a front end. Its engine is gone within two seconds, unless it goes on."""

    exit: str
    clients: str
    """What those see that wait for an answer."""


_GO_ON: Final = "go on"
_NONE: Final = "there are none"

_AFTERWARDS: Final[dict[Moment, tuple[tuple[str, ...], str]]] = {
    "idle": (("recovering", "ready"), _NONE),
    "prefill": (("recovering", "ready"), _GO_ON),
    "decode": (("recovering", "ready"), _GO_ON),
    "draining": (("draining",), "go on; then exit code 0"),
    "asleep": (("recovering", "asleep"), "go on when it is woken up"),
    "paused": (("recovering", "ready"), "go on when it is resumed"),
}


def _engine_fate(fault: Fault, moment: Moment) -> EngineFate:
    states, requests = _AFTERWARDS[moment]
    # A drain is what matters to whoever asks then.
    is_seen = fault == "SIGSTOP" and moment != "draining"
    return EngineFate((*(("stalled",) if is_seen else ()), *states), requests)


ENGINE: Final = {(fault, moment): _engine_fate(fault, moment) for fault in FAULTS for moment in MOMENTS}

REASONS: Final[dict[Fault, str]] = {
    "SIGKILL": "the engine process was ended by SIGKILL",
    "SIGSTOP": "the engine stalls",
    "exception": "RuntimeError: the device is lost",
    "exit 0": "the engine process ended with exit code 0",
}
"""The root cause, as it begins."""

_EXITS: Final[dict[Fault, str]] = {
    "SIGKILL": "SIGKILL",
    "SIGSTOP": "",
    "exception": "exit code 1",
    "exit 0": "exit code 0",
}


def _front_end_fate(fault: Fault, moment: Moment) -> FrontEndFate:
    if fault == "SIGSTOP":
        waits = {"asleep": " when it is woken up", "paused": " when it is resumed"}
        return FrontEndFate(
            "exit code 0, after SIGCONT and the drain" if moment == "draining" else "none: it goes on after SIGCONT",
            _NONE if moment == "idle" else f"the whole answer{waits.get(moment, '')}",
        )
    return FrontEndFate(_EXITS[fault], _NONE if moment == "idle" else "a connection that breaks off")


FRONT_END: Final = {(fault, moment): _front_end_fate(fault, moment) for fault in FAULTS for moment in MOMENTS}


def render_engine() -> str:
    """A row for what the engine was doing; the last one has the reason that is told."""
    lines = [f"| the engine is | {' | '.join(FAULTS)} | unfinished requests |", "|---" * (len(FAULTS) + 2) + "|"]
    for moment in MOMENTS:
        fates = [ENGINE[fault, moment] for fault in FAULTS]
        (requests,) = {fate.requests for fate in fates}
        lines.append(f"| {moment} | {' | '.join(', '.join(fate.states) for fate in fates)} | {requests} |")
    lines.append(f"| *the reason begins* | {' | '.join(REASONS[fault] for fault in FAULTS)} | |")
    return "\n".join(lines)


def render_front_end() -> str:
    """A row for what it was doing, and for each fault how the process ends and what clients get."""
    lines = [f"| the front end is | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 1) + "|"]
    for moment in MOMENTS:
        fates = [FRONT_END[fault, moment] for fault in FAULTS]
        lines.append(f"| {moment} | {' | '.join(_cell(fate) for fate in fates)} |")
    return "\n".join(lines)


def _cell(fate: FrontEndFate) -> str:
    return fate.exit if fate.clients == _NONE else f"{fate.exit}; clients get {fate.clients}"


if __name__ == "__main__":
    print(render_engine(), render_front_end(), sep="\n\n")
