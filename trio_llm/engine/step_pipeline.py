"""StepPipeline: launches the scheduler's plans on the executor, retires them in order, and measures them.

Owned by EngineCore. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trio_llm.engine.executor.base import Executor, LaunchedStep
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.engine.scheduling.step_budget import StepBudget
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["StepPipeline"]


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    plan: StepPlan
    step: LaunchedStep
    began_s: float


class StepPipeline:
    """The steps in flight.

    Args:
        run_ahead: steps that are launched before the one before them is retired.
        budget: what bounds the duration of steps in which sequences decode; None: nothing does.
        clock: seconds.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        run_ahead: int,
        budget: StepBudget | None,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._run_ahead = run_ahead
        self._budget = budget
        self._clock = clock
        self._in_flight: deque[_Launched] = deque()
        """Launched and not retired, the oldest first."""
        self._retired_s = 0.0
        """When the last step was retired."""
        self.num_retired = 0

    @property
    def is_empty(self) -> bool:
        return not self._in_flight

    def advance(self, *, may_plan: bool) -> list[EngineCoreOutput]:
        """Launch the next step, if there is one and `may_plan` is true, and retire the one whose turn it is.

        Raises:
            Exception: the executor failed as a whole; the engine cannot go on.
        """
        plan = self._schedule() if may_plan else None
        if plan:
            began_s = self._clock()
            self._in_flight.append(_Launched(plan, self._executor.launch(plan), began_s))
        if self._in_flight and (plan is None or len(self._in_flight) > self._run_ahead):
            return self._retire()
        return []

    def drain(self) -> list[EngineCoreOutput]:
        """Retire all steps in flight. Raises as `advance`."""
        rows = []
        while self._in_flight:
            rows += self._retire()
        return rows

    def _schedule(self) -> StepPlan | None:
        max_prefill_tokens = None if self._budget is None else self._budget.num_prefill_tokens
        return self._scheduler.schedule(now_s=self._clock(), max_prefill_tokens=max_prefill_tokens)

    def _retire(self) -> list[EngineCoreOutput]:
        oldest = self._in_flight.popleft()
        result = oldest.step.wait()
        now_s = self._clock()
        if self._budget is not None:
            # A step that was launched ahead begins when the one before it ends.
            seconds = now_s - max(oldest.began_s, self._retired_s)
            num_decodes = oldest.plan.num_decodes
            self._budget.observe(oldest.plan.num_tokens - num_decodes, seconds, has_decodes=num_decodes > 0)
        self._retired_s = now_s
        self.num_retired += 1
        return self._scheduler.commit(oldest.plan, result)
