"""EngineControlState: what of the engine is asleep, and whether it generates. Two tables, one for each question.

Pure. Owned by the utilities, which do what a change of state stands for. `docs/control.md` draws the tables.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

from trio_llm.engine.device import WeightsLocation
from trio_llm.wire.messages import PlainValue

__all__ = [
    "PARTS",
    "PAUSES",
    "SLEEP_STATES",
    "EngineControlState",
    "Pause",
    "PauseEvent",
    "SleepEvent",
    "SleepState",
]

PARTS: Final = ("weights", "kv_cache")
"""What can be woken by itself, in the order of waking."""

SleepEvent = Literal["sleep 1", "sleep 2", "wake weights", "wake kv_cache"]
PauseEvent = Literal["pause abort", "pause wait", "pause keep", "resume"]


class SleepState(enum.Enum):
    """What is where. Steps run only when all is awake."""

    AWAKE = "awake"
    LEVEL_1 = "level 1"
    """The weights are in host memory, there is no KV cache."""
    LEVEL_2 = "level 2"
    """The weights are dropped, there is no KV cache."""
    ONLY_WEIGHTS = "only weights"
    """The weights are back, the KV cache is not."""
    LEVEL_1_CACHE = "level 1 with cache"
    LEVEL_2_CACHE = "level 2 with cache"
    """The KV cache is back, the weights are not."""

    @property
    def weights(self) -> WeightsLocation:
        return _PLACES[self][0]

    @property
    def has_cache(self) -> bool:
        return _PLACES[self][1]

    @property
    def level(self) -> int:
        """0: awake; 2: weights are dropped; 1: anything else."""
        if self is SleepState.AWAKE:
            return 0
        return 2 if self.weights is WeightsLocation.DROPPED else 1


_PLACES: Final[dict[SleepState, tuple[WeightsLocation, bool]]] = {
    SleepState.AWAKE: (WeightsLocation.DEVICE, True),
    SleepState.LEVEL_1: (WeightsLocation.HOST, False),
    SleepState.LEVEL_2: (WeightsLocation.DROPPED, False),
    SleepState.ONLY_WEIGHTS: (WeightsLocation.DEVICE, False),
    SleepState.LEVEL_1_CACHE: (WeightsLocation.HOST, True),
    SleepState.LEVEL_2_CACHE: (WeightsLocation.DROPPED, True),
}

SLEEP_STATES: Final[dict[SleepState, dict[SleepEvent, SleepState]]] = {
    SleepState.AWAKE: {"sleep 1": SleepState.LEVEL_1, "sleep 2": SleepState.LEVEL_2},
    SleepState.LEVEL_1: {
        "sleep 2": SleepState.LEVEL_2,
        "wake weights": SleepState.ONLY_WEIGHTS,
        "wake kv_cache": SleepState.LEVEL_1_CACHE,
    },
    # What is dropped cannot be put into host memory: `sleep 1` changes nothing.
    SleepState.LEVEL_2: {"wake weights": SleepState.ONLY_WEIGHTS, "wake kv_cache": SleepState.LEVEL_2_CACHE},
    SleepState.ONLY_WEIGHTS: {
        "sleep 1": SleepState.LEVEL_1,
        "sleep 2": SleepState.LEVEL_2,
        "wake kv_cache": SleepState.AWAKE,
    },
    SleepState.LEVEL_1_CACHE: {
        "sleep 1": SleepState.LEVEL_1,
        "sleep 2": SleepState.LEVEL_2,
        "wake weights": SleepState.AWAKE,
    },
    SleepState.LEVEL_2_CACHE: {
        "sleep 1": SleepState.LEVEL_2,
        "sleep 2": SleepState.LEVEL_2,
        "wake weights": SleepState.AWAKE,
    },
}
"""An event that is not there changes nothing: so every call is idempotent."""


class Pause(enum.Enum):
    """Whether sequences get their turn."""

    RUNNING = "running"
    WAIT = "wait"
    """Those that have begun go on to their end, new ones wait."""
    KEEP = "keep"
    """Nothing is computed; what is in the KV cache stays there."""


PAUSES: Final[dict[Pause, dict[PauseEvent, Pause]]] = {
    # After `pause abort` nothing is left to run.
    Pause.RUNNING: {"pause abort": Pause.KEEP, "pause wait": Pause.WAIT, "pause keep": Pause.KEEP},
    Pause.WAIT: {"pause abort": Pause.KEEP, "pause keep": Pause.KEEP, "resume": Pause.RUNNING},
    Pause.KEEP: {"pause wait": Pause.WAIT, "resume": Pause.RUNNING},
}
"""As above. The last call counts, whatever the one before was."""


@dataclass(slots=True)
class EngineControlState:
    """All that control calls change. They change it one at a time, between steps."""

    sleep_state: SleepState = SleepState.AWAKE
    pause: Pause = Pause.RUNNING
    weight_version: str = "default"
    weights_path: str | None = None
    """Directory of the weights of the last update; None: those that the engine was started with."""

    @property
    def may_step(self) -> bool:
        """Steps may run now."""
        return self.sleep_state is SleepState.AWAKE and self.pause is not Pause.KEEP

    @property
    def admits_new(self) -> bool:
        """Sequences that have not begun may begin."""
        return self.pause is Pause.RUNNING

    def sleep_state_after(self, event: SleepEvent) -> SleepState:
        return SLEEP_STATES[self.sleep_state].get(event, self.sleep_state)

    def pause_after(self, event: PauseEvent) -> Pause:
        return PAUSES[self.pause].get(event, self.pause)

    def describe(self) -> dict[str, PlainValue]:
        """As plain data: what control calls answer."""
        return {
            "sleep_level": self.sleep_state.level,
            "weights_asleep": self.sleep_state.weights is not WeightsLocation.DEVICE,
            "kv_cache_asleep": not self.sleep_state.has_cache,
            "pause": self.pause.value,
            "weight_version": self.weight_version,
            "weights_path": self.weights_path,
        }
