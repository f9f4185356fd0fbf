"""EngineControlState: which parts of the engine sleep, and whether it generates. Each has a table of transitions.

Pure. Owned by ControlCalls, which carries out each change. `docs/control.md` draws the tables.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, Literal

from trio_llm.engine.device import WeightsLocation
from trio_llm.wire.messages import PlainValue, StateValue

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
"""Parts that can be woken separately, in the order of waking."""

SleepEvent = Literal["sleep 1", "sleep 2", "wake weights", "wake kv_cache"]
PauseEvent = Literal["pause abort", "pause wait", "pause keep", "resume"]


class SleepState(enum.Enum):
    """Where the weights and the KV cache are. Steps run only when both are awake."""

    AWAKE = "awake"
    LEVEL_1 = "level 1"
    """The weights are in host memory; there is no KV cache."""
    LEVEL_2 = "level 2"
    """The weights are dropped; there is no KV cache."""
    ONLY_WEIGHTS = "only weights"
    """The weights are on the device again; there is no KV cache."""
    LEVEL_1_CACHE = "level 1 with cache"
    LEVEL_2_CACHE = "level 2 with cache"
    """The KV cache is there again; the weights are still dropped."""

    @property
    def weights(self) -> WeightsLocation:
        return _LOCATIONS[self][0]

    @property
    def has_cache(self) -> bool:
        return _LOCATIONS[self][1]

    @property
    def level(self) -> int:
        """0: awake; 2: weights are dropped; 1: anything else."""
        if self is SleepState.AWAKE:
            return 0
        return 2 if self.weights is WeightsLocation.DROPPED else 1


_LOCATIONS: Final[dict[SleepState, tuple[WeightsLocation, bool]]] = {
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
    # Dropped weights cannot be put into host memory: `sleep 1` changes nothing.
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
"""An event that is not listed changes nothing, so every call is idempotent."""


class Pause(enum.Enum):
    """Which sequences are computed."""

    RUNNING = "running"
    WAIT = "wait"
    """Sequences that have begun are computed to their end; new ones wait."""
    KEEP = "keep"
    """No sequence is computed; the KV cache keeps its content."""


PAUSES: Final[dict[Pause, dict[PauseEvent, Pause]]] = {
    # After `pause abort` no sequence is left.
    Pause.RUNNING: {"pause abort": Pause.KEEP, "pause wait": Pause.WAIT, "pause keep": Pause.KEEP},
    Pause.WAIT: {"pause abort": Pause.KEEP, "pause keep": Pause.KEEP, "resume": Pause.RUNNING},
    Pause.KEEP: {"pause wait": Pause.WAIT, "resume": Pause.RUNNING},
}
"""As above. The last call counts, whatever the state before it."""


@dataclass(slots=True)
class EngineControlState:
    """All state that control calls change, one call at a time and between steps."""

    sleep_state: SleepState = SleepState.AWAKE
    pause: Pause = Pause.RUNNING
    weight_version: str = "default"
    weights_path: str | None = None
    """Directory of the last weight update; None: the weights that the engine was started with."""
    weights_files: dict[str, str] = field(default_factory=dict)
    """If they came in several files: their names in that directory, each with its checksum."""
    transfer_directory: str | None = None
    """Directory of the files of updates to come; None: not said yet."""
    update_files: dict[str, str] | None = None
    """Files of the update that is open, each with its checksum; None: none is."""

    @property
    def may_step(self) -> bool:
        """Steps may run now."""
        return self.sleep_state is SleepState.AWAKE and self.pause is not Pause.KEEP

    @property
    def admits_new(self) -> bool:
        """New sequences may begin."""
        return self.pause is Pause.RUNNING

    def sleep_state_after(self, event: SleepEvent) -> SleepState:
        """The state that an event leads to; nothing is changed."""
        return SLEEP_STATES[self.sleep_state].get(event, self.sleep_state)

    def pause_after(self, event: PauseEvent) -> Pause:
        """The pause that an event leads to; nothing is changed."""
        return PAUSES[self.pause].get(event, self.pause)

    def describe(self) -> dict[str, StateValue]:
        """The state as plain data, which is the answer of control calls. Files are lines as in a list of checksums:
        the checksum, two spaces, the name."""
        return {
            "sleep_level": self.sleep_state.level,
            "weights_asleep": self.sleep_state.weights is not WeightsLocation.DEVICE,
            "kv_cache_asleep": not self.sleep_state.has_cache,
            "pause": self.pause.value,
            "weight_version": self.weight_version,
            "weights_path": self.weights_path,
            "weights_files": _lines(self.weights_files),
            "transfer_directory": self.transfer_directory,
            "update_files": None if self.update_files is None else _lines(self.update_files),
        }


def _lines(files: dict[str, str]) -> list[PlainValue]:
    return [f"{checksum}  {name}" for name, checksum in files.items()]
