"""ControlState: what control calls have made of an engine, as plain data that can be replayed to a new incarnation.

Pure. Kept by `Engine`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trio_llm.wire.messages import PlainValue, UtilityCall

__all__ = ["REPLAYED", "ControlState"]

REPLAYED = 0
"""The call id of replayed calls: no caller waits for their answers."""


class ControlState(msgspec.Struct, frozen=True, gc=False):
    """As the engine described it last. Only the engine knows the rules by which it changes."""

    sleep_level: int = 0
    """0: awake. 2: the weights are dropped. 1: any other part is asleep."""
    weights_asleep: bool = False
    kv_cache_asleep: bool = False
    pause: Literal["running", "wait", "keep"] = "running"
    weight_version: str = "default"
    weights_path: str | None = None
    """Directory of the weights of the last update; None: those that the engine was started with."""
    weights_files: tuple[str, ...] = ()
    """If they came in several files: each one's checksum, two spaces, and its name in that directory."""
    transfer_directory: str | None = None
    """Directory of the files of updates to come; None: not said yet."""
    update_files: tuple[str, ...] | None = None
    """Files of the update that is open, in the same form; None: none is."""

    @property
    def is_asleep(self) -> bool:
        return self.weights_asleep or self.kv_cache_asleep

    @property
    def is_held(self) -> bool:
        """Unfinished requests may wait without end: that is no stall."""
        return self.is_asleep or self.pause != "running"

    def describe(self) -> str:
        """In words, for the log."""
        parts = [f"asleep (level {self.sleep_level})" if self.is_asleep else "awake"]
        if self.pause != "running":
            parts.append(f"paused ({self.pause})")
        return f"{', '.join(parts)}, with the weights {self.weight_version!r}"

    def replay(self) -> list[UtilityCall]:
        """The calls that bring a new engine into this state. To be sent before any request.

        After a pause with the mode `abort` no request is left to abort: it is replayed as `keep`.
        """
        calls: list[tuple[str, list[PlainValue]]] = []
        if self.weights_files:
            calls.append(("restore_weights", [self.weights_path, self.weight_version, *self.weights_files]))
        elif self.weights_path is not None:
            calls.append(("update_weights", [self.weights_path, self.weight_version]))
        if self.transfer_directory is not None:
            is_open = self.update_files is not None
            calls.append(("restore_weight_update", [self.transfer_directory, is_open, *(self.update_files or ())]))
        if self.is_asleep:
            calls.append(("sleep", [self.sleep_level]))
            parts = {"weights": self.weights_asleep, "kv_cache": self.kv_cache_asleep}
            calls += [("wake_up", [part]) for part, is_asleep in parts.items() if not is_asleep]
        if self.pause != "running":
            calls.append(("pause", [self.pause, False]))
        return [UtilityCall(REPLAYED, method, args) for method, args in calls]
