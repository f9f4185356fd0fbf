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

_Call = tuple[str, list[PlainValue]]
"""A method, and its arguments."""


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
        """The calls that bring a new engine into this state. To be sent before any request."""
        calls: list[_Call] = []
        if self.weights_path is not None:
            calls.append(self._take_weights(self.weights_path))
        if self.transfer_directory is not None:
            calls.append(self._open_transfer())
        calls += self._sleep_again() + self._pause()
        return [UtilityCall(REPLAYED, method, args) for method, args in calls]

    def calls_from(self, other: ControlState, *, first_weights: str) -> list[_Call]:
        """The methods, with arguments, that bring an engine back into this state after a call that made `other` of it.

        Args:
            first_weights: directory of the weights that the engine was started with.
        """
        calls: list[_Call] = []
        has_other_weights = self._weights != other._weights
        if has_other_weights or self._sleep_again() != other._sleep_again():
            if other.is_asleep:
                calls.append(("wake_up", []))
            if has_other_weights:
                calls.append(self._take_weights(self.weights_path or first_weights))
            calls += self._sleep_again()
        if has_other_weights or self._open_transfer() != other._open_transfer():
            calls.append(self._open_transfer())
        if self.pause != other.pause:
            calls += self._pause() or [("resume", [])]
        return calls

    @property
    def _weights(self) -> tuple[str | None, tuple[str, ...], str]:
        return self.weights_path, self.weights_files, self.weight_version

    def _take_weights(self, path: str) -> _Call:
        if self.weights_files:
            return ("restore_weights", [path, self.weight_version, *self.weights_files])
        return ("update_weights", [path, self.weight_version])

    def _open_transfer(self) -> _Call:
        """To come after weights, which end an update that is open."""
        is_open = self.update_files is not None
        return ("restore_weight_update", [self.transfer_directory, is_open, *(self.update_files or ())])

    def _sleep_again(self) -> list[_Call]:
        """From awake."""
        if not self.is_asleep:
            return []
        parts = {"weights": self.weights_asleep, "kv_cache": self.kv_cache_asleep}
        calls: list[_Call] = [("sleep", [self.sleep_level])]
        calls += [("wake_up", [part]) for part, is_asleep in parts.items() if not is_asleep]
        return calls

    def _pause(self) -> list[_Call]:
        """From running. After a pause with the mode `abort` no request is left to abort: it is made again as `keep`."""
        return [] if self.pause == "running" else [("pause", [self.pause, False])]
