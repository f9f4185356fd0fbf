"""EngineMonitor: what state an engine is in, by what it sends and by how long it sends nothing.

Owned by `Engine`, which reports what arrives; `watch` runs as a task in the nursery of `open_llm`.
"""

from __future__ import annotations

from typing import Final, Protocol

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError, fresh
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.wire.messages import Progress

__all__ = ["EngineMonitor", "Watched"]

_LONGEST_LOOK_S: Final = 5.0
"""Longest time between two looks of the watch."""
_SECOND_LOOK_S: Final = 0.5
"""Time from the first look that finds a problem to the second. Perhaps this process was stopped, and what the engine
sent meanwhile waits to be read."""


class Watched(Protocol):
    """An engine as far as the monitor knows it."""

    @property
    def num_expected(self) -> int:
        """Requests that the engine owes an answer and may work for."""
        ...

    @property
    def is_under_control(self) -> bool:
        """A control call is under way: the engine may be silent for as long as a start takes."""
        ...

    def kill(self, reason: str) -> None:
        """End an incarnation that is stuck."""
        ...


class EngineMonitor:
    """From the start of the first incarnation to the end of the last."""

    def __init__(self, config: EngineConfig, engine: Watched) -> None:
        self._startup_timeout_s = config.startup_timeout_s
        self._stall_timeout_s = config.stall_timeout_s
        self._engine = engine
        self._started_s = self._last_life_s = self._last_step_s = trio.current_time()
        self._is_killed = False
        """This incarnation was: once is enough."""
        self.progress = Progress(0, "starting", 0, 0)
        self.lost_reason: str | None = None
        """Why the incarnation died that none has followed yet; None: there is one, or none ever will be."""
        self.dead_error: EngineDeadError | None = None
        self._is_dead = trio.Event()
        self.is_ready = False
        """The first incarnation was ready, and what belongs to its model is loaded here. Set by the owner."""

    # -------------------------------------------------------------------------------------- reports

    def record_life(self) -> None:
        """The engine has sent something."""
        self._last_life_s = trio.current_time()

    def record_step(self) -> None:
        """The engine has computed something."""
        self._last_step_s = trio.current_time()

    def mark_lost(self, reason: str) -> None:
        """An incarnation is dead, and another one is started."""
        self.lost_reason = reason
        self.progress = Progress(0, "starting", 0, 0)
        self._started_s = self._last_life_s = trio.current_time()
        self._is_killed = False

    def mark_ready(self) -> None:
        """An incarnation is ready: the first, or one that follows a death."""
        self.lost_reason = None
        self._is_killed = False
        self.record_step()

    def mark_dead(self, error: EngineDeadError) -> None:
        """The last incarnation is dead."""
        self.dead_error = error
        self._is_dead.set()

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the last incarnation is dead. Cancellation: safe."""
        await self._is_dead.wait()
        assert self.dead_error is not None
        return self.dead_error

    # -------------------------------------------------------------------------------------- questions

    def status(self) -> EngineStatus:
        """The state in words, for `/health` and progress bars."""
        elapsed_s = trio.current_time() - self._started_s
        progress = self.progress
        if self.dead_error is not None:
            return EngineStatus(state="dead", reason=str(self.dead_error), elapsed_s=elapsed_s)
        if not self.is_ready or self.lost_reason is not None:
            return EngineStatus(
                state="recovering" if self.is_ready else "loading",
                phase=progress.phase,
                done=progress.done,
                total=progress.total,
                elapsed_s=elapsed_s,
                reason=self.lost_reason,
            )
        if not self._engine.is_under_control and (problem := self._find_stall(self._stall_timeout_s / 2)):
            return EngineStatus(state="stalled", elapsed_s=elapsed_s, reason=problem)
        return EngineStatus(state="ready", elapsed_s=elapsed_s)

    def not_ready(self) -> EngineDeadError | EngineUnavailableError:
        """Why there is no loaded model now."""
        if self.dead_error is not None:
            return fresh(self.dead_error)
        progress = self.progress
        how_far = f", {progress.done} of {progress.total}" if progress.total else ""
        if self.lost_reason is not None:
            return EngineUnavailableError(
                f"the engine has died and is started again (phase {progress.phase}{how_far}): {self.lost_reason}"
            )
        return EngineUnavailableError(f"the model is still loading (phase {progress.phase}{how_far})")

    # -------------------------------------------------------------------------------------- watch

    async def watch(self) -> None:
        """End an incarnation that sends nothing for too long, or computes nothing although it should.

        Cancellation: safe.
        """
        was_problem = False
        while self.dead_error is None:
            now_s = trio.current_time()
            is_starting = not self.is_ready or self.lost_reason is not None
            is_patient = is_starting or self._engine.is_under_control
            limit_s = self._startup_timeout_s if is_patient else self._stall_timeout_s
            if is_patient or not self._engine.num_expected:
                self._last_step_s = now_s
            problem = self._find_silence(limit_s) if is_patient else self._find_stall(limit_s)
            if problem and was_problem and not self._is_killed:
                self._is_killed = True
                self._engine.kill(problem)
            left_s = min(self._last_life_s, self._last_step_s) + limit_s - now_s
            look_s = min(_LONGEST_LOOK_S, limit_s / 4)
            is_first_time = bool(problem) and not was_problem
            was_problem = bool(problem)
            with trio.move_on_after(min(left_s if left_s > 0 else look_s, _SECOND_LOOK_S if is_first_time else look_s)):
                await self._is_dead.wait()

    def _find_silence(self, limit_s: float) -> str | None:
        if trio.current_time() - self._last_life_s < limit_s:
            return None
        if self.is_ready and self.lost_reason is None:
            return f"the engine gave no sign of life for {limit_s:g} s in a control call"
        return f"the engine gave no sign of life for {limit_s:g} s in phase {self.progress.phase!r}"

    def _find_stall(self, limit_s: float) -> str | None:
        now_s = trio.current_time()
        if now_s - self._last_life_s >= limit_s:
            return f"the engine stalls: no sign of life for {limit_s:g} s (--stall-timeout {self._stall_timeout_s:g})"
        # The time first: it is asked with each answer of the server, and requests are counted one by one.
        if now_s - self._last_step_s >= limit_s and (num_expected := self._engine.num_expected):
            return (
                f"the engine stalls: no step for {limit_s:g} s with {num_expected} requests unfinished "
                f"(--stall-timeout {self._stall_timeout_s:g})"
            )
        return None
