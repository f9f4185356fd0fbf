"""EngineMonitor: what state the engine is in, by what it says and by how long it says nothing.

Used by `AsyncLLM`, which tells it what comes from the engine, and runs its watch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError, fresh
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.core_client.base import EngineLost
from trio_llm.wire.messages import Progress

__all__ = ["EngineMonitor"]

_LONGEST_LOOK_S: Final = 5.0
"""Between two looks of the watch."""
_SECOND_LOOK_S: Final = 0.5
"""After the first one that finds a problem. It may have been this process that was stopped, and what the engine said
meanwhile waits to be read."""


class EngineMonitor:
    """From the start of the first incarnation to the end of the last.

    Args:
        kill: ends an incarnation that is stuck, with the reason.
        num_expected: requests that the engine owes an answer and may work for.
        is_under_control: a control call is under way: the engine may be silent for as long as a start takes.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kill: Callable[[str], None],
        num_expected: Callable[[], int],
        is_under_control: Callable[[], bool],
    ) -> None:
        self._startup_timeout_s = config.startup_timeout_s
        self._stall_timeout_s = config.stall_timeout_s
        self._kill = kill
        self._num_expected = num_expected
        self._is_under_control = is_under_control
        self._started_s = self._last_life_s = self._last_step_s = trio.current_time()
        self._is_killed = False
        """This incarnation: once is enough."""
        self.progress = Progress(0, "starting", 0, 0)
        self.lost: EngineLost | None = None
        """The death after which no other incarnation has become ready yet."""
        self.dead_error: EngineDeadError | None = None
        self._is_dead = trio.Event()
        self.is_ready = False
        """The first incarnation was, and its tokenizer is loaded."""

    # ---------------------------------------------------------------------------------- what is told

    def sign_of_life(self) -> None:
        self._last_life_s = trio.current_time()

    def step(self) -> None:
        """Something was computed."""
        self._last_step_s = trio.current_time()

    def lose(self, lost: EngineLost) -> None:
        """An incarnation is dead, and another one is started."""
        self.lost = lost
        self.progress = Progress(0, "starting", 0, 0)
        self._started_s = self._last_life_s = trio.current_time()
        self._is_killed = False

    def ready(self) -> None:
        """An incarnation is ready: the first, or one that goes on after a death."""
        self.lost = None
        self.step()

    def die(self, error: EngineDeadError) -> None:
        """The last incarnation is dead."""
        self.dead_error = error
        self._is_dead.set()

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the last incarnation is dead. Cancellation: safe."""
        await self._is_dead.wait()
        assert self.dead_error is not None
        return self.dead_error

    # --------------------------------------------------------------------------------------- answers

    def status(self, *, is_draining: bool) -> EngineStatus:
        """The state in words, for `/health` and progress bars."""
        elapsed_s = trio.current_time() - self._started_s
        progress = self.progress
        if self.dead_error is not None:
            return EngineStatus(state="dead", reason=str(self.dead_error), elapsed_s=elapsed_s)
        if is_draining:
            return EngineStatus(state="draining", elapsed_s=elapsed_s)
        if not self.is_ready or self.lost is not None:
            return EngineStatus(
                state="recovering" if self.is_ready else "loading",
                phase=progress.phase,
                done=progress.done,
                total=progress.total,
                elapsed_s=elapsed_s,
                reason=None if self.lost is None else self.lost.reason,
            )
        if not self._is_under_control() and (problem := self._find_stall(self._stall_timeout_s / 2)):
            return EngineStatus(state="stalled", elapsed_s=elapsed_s, reason=problem)
        return EngineStatus(state="ready", elapsed_s=elapsed_s)

    def not_ready(self) -> EngineDeadError | EngineUnavailableError:
        """Why there is no loaded model now."""
        if self.dead_error is not None:
            return fresh(self.dead_error)
        progress = self.progress
        how_far = f", {progress.done} of {progress.total}" if progress.total else ""
        if self.lost is not None:
            return EngineUnavailableError(
                f"the engine has died and is started again (phase {progress.phase}{how_far}): {self.lost.reason}"
            )
        return EngineUnavailableError(f"the model is still loading (phase {progress.phase}{how_far})")

    # ----------------------------------------------------------------------------------------- watch

    async def watch(self) -> None:
        """End an incarnation that says nothing for too long, or computes nothing although it should.

        Cancellation: safe.
        """
        was_problem = False
        while self.dead_error is None:
            now_s = trio.current_time()
            is_starting = not self.is_ready or self.lost is not None
            is_patient = is_starting or self._is_under_control()
            limit_s = self._startup_timeout_s if is_patient else self._stall_timeout_s
            if is_patient or not self._num_expected():
                self._last_step_s = now_s
            problem = self._find_silence(limit_s) if is_patient else self._find_stall(limit_s)
            if problem and was_problem and not self._is_killed:
                self._is_killed = True
                self._kill(problem)
            left_s = min(self._last_life_s, self._last_step_s) + limit_s - now_s
            look_s = min(_LONGEST_LOOK_S, limit_s / 4)
            is_first_time = bool(problem) and not was_problem
            was_problem = bool(problem)
            with trio.move_on_after(min(left_s if left_s > 0 else look_s, _SECOND_LOOK_S if is_first_time else look_s)):
                await self._is_dead.wait()

    def _find_silence(self, limit_s: float) -> str | None:
        if trio.current_time() - self._last_life_s < limit_s:
            return None
        if self.is_ready and self.lost is None:
            return f"the engine gave no sign of life for {limit_s:g} s in a control call"
        return f"the engine gave no sign of life for {limit_s:g} s in phase {self.progress.phase!r}"

    def _find_stall(self, limit_s: float) -> str | None:
        now_s = trio.current_time()
        if now_s - self._last_life_s >= limit_s:
            return f"the engine stalls: no sign of life for {limit_s:g} s (--stall-timeout {self._stall_timeout_s:g})"
        num_expected = self._num_expected()
        if num_expected and now_s - self._last_step_s >= limit_s:
            return (
                f"the engine stalls: no step for {limit_s:g} s with {num_expected} requests unfinished "
                f"(--stall-timeout {self._stall_timeout_s:g})"
            )
        return None
