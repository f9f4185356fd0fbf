"""The states of an engine as `/health` tells them, and what leads from one to another.

Pure. `test_engine_states.py` holds the code to it; `docs/recovery.md` shows the diagram as it is drawn here.
"""

from __future__ import annotations

from typing import Final

from trio_llm.frontend.control.status import EngineState

__all__ = ["TRANSITIONS", "diagram"]

_DIES: Final = "it dies"
_FOR_GOOD: Final = "it dies for good"
_SIGNAL: Final = "SIGTERM"

TRANSITIONS: Final[dict[EngineState, dict[EngineState, str]]] = {
    "loading": {"ready": "model and tokenizer are loaded", "draining": _SIGNAL, "dead": "it dies before that"},
    "ready": {
        "asleep": "sleep",
        "stalled": "it says or does nothing",
        "recovering": _DIES,
        "draining": _SIGNAL,
        "dead": _FOR_GOOD,
    },
    "asleep": {
        "ready": "wake_up",
        "stalled": "it says nothing",
        "recovering": _DIES,
        "draining": _SIGNAL,
        "dead": _FOR_GOOD,
    },
    "stalled": {
        "ready": "it goes on",
        "asleep": "it goes on",
        "recovering": "it is killed",
        "draining": _SIGNAL,
        "dead": "it is killed, for good",
    },
    "recovering": {
        "ready": "another one is ready",
        "asleep": "another one sleeps",
        "draining": _SIGNAL,
        "dead": "no restart is left",
    },
    "draining": {"dead": _FOR_GOOD},
    "dead": {},
}


def diagram() -> str:
    """As Mermaid."""
    lines = [f"    [*] --> {next(iter(TRANSITIONS))}"]
    for state, targets in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {event}" for target, event in targets.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])
