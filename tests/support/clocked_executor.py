"""ClockedExecutor: a FakeExecutor whose steps take time on a clock of the test's own, as long as the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trio_llm.config import FakeEngineConfig
from trio_llm.engine.executor.base import LaunchedStep
from trio_llm.engine.executor.fake import FakeExecutor
from trio_llm.engine.scheduling.step import StepPlan, StepResult

__all__ = ["Clock", "ClockedExecutor"]


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class ClockedExecutor(FakeExecutor):
    """A device beside the host: a step begins when it is launched and the one before it is through.

    Args:
        step_s: how long a step takes.
    """

    def __init__(
        self, clock: Clock, step_s: Callable[[StepPlan], float], *, num_blocks: int = 128, fake: FakeEngineConfig
    ) -> None:
        super().__init__(fake, num_blocks=num_blocks, model_dir="/m")
        self.step_s = step_s
        self.steps: list[tuple[StepPlan, float]] = []
        """All steps that were launched, with the seconds that each took."""
        self.on_launch: Callable[[], None] = lambda: None
        self._clock = clock
        self._free_s = 0.0
        """When the device is through with all that was launched."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.on_launch()
        seconds = self.step_s(plan)
        self.steps.append((plan, seconds))
        self._free_s = max(self._free_s, self._clock.now_s) + seconds
        return _ClockedStep(super().launch(plan), self._clock, self._free_s)


@dataclass
class _ClockedStep:
    launched: LaunchedStep
    clock: Clock
    end_s: float

    def wait(self) -> StepResult:
        self.clock.now_s = max(self.clock.now_s, self.end_s)
        return self.launched.wait()
