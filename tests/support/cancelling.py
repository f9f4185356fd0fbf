"""Cancel a piece of code at its first checkpoint, then at its second, and so on until it runs to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from trio.abc import Instrument
from trio.lowlevel import Task

__all__ = ["cancel_at_every_checkpoint"]


class _CancelAt(Instrument):
    """Cancels a scope when one task has taken so many steps."""

    def __init__(self, task: Task, scope: trio.CancelScope, num_steps: int) -> None:
        self._task = task
        self._scope = scope
        self._left = num_steps

    def after_task_step(self, task: Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def cancel_at_every_checkpoint(
    work: Callable[[], Awaitable[object]], check: Callable[[], Awaitable[object]], *, at_most: int = 500
) -> int:
    """Run `work` again and again, cancelled one checkpoint later each time, with `check` after each run.

    Returns the number of checkpoints that `work` has when nobody cancels it.
    """
    for num_steps in range(1, at_most):
        was_cancelled = await _run_cancelled_at(num_steps, work)
        await check()
        if not was_cancelled:
            return num_steps
    raise AssertionError(f"the work is not over after {at_most} checkpoints")


async def _run_cancelled_at(num_steps: int, work: Callable[[], Awaitable[object]]) -> bool:
    scope = trio.CancelScope()

    async def run() -> None:
        instrument = _CancelAt(trio.lowlevel.current_task(), scope, num_steps)
        trio.lowlevel.add_instrument(instrument)
        try:
            with scope:
                await work()
        finally:
            trio.lowlevel.remove_instrument(instrument)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
    return scope.cancelled_caught
