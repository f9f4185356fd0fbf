"""StepBuilder: a plan in the making. StepInFlight: one that is made, until its result is in.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trio_llm.engine.executor.base import ScheduledChunk, StepPlan
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState

__all__ = ["StepBuilder", "StepInFlight"]


@dataclass(slots=True)
class StepBuilder:
    """Chunks, as long as there is budget."""

    budget_left: int
    """Tokens."""
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Compute as much of the sequence as the budget allows."""
        uncomputed = sequence.num_uncomputed_tokens
        count = min(uncomputed, self.budget_left)
        samples = count == uncomputed
        self.chunks.append(
            ScheduledChunk(sequence=sequence, start=sequence.num_computed_tokens, count=count, samples=samples)
        )
        self.budget_left -= count
        sequence.num_computed_tokens += count
        sequence.num_pending_tokens += samples
        sequence.num_in_flight += 1


@dataclass(slots=True, eq=False)
class StepInFlight:
    plan: StepPlan
    left_behind: list[list[int]] = field(default_factory=list)
    """Blocks of sequences that are over: this step may write into them still."""

    def check(self, limits: SchedulerLimits) -> None:
        """Assert that the plan is within the limits and that its sequences know of it."""
        plan = self.plan
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks) <= limits.max_num_seqs
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            assert chunk.count > 0
            assert sequence.num_in_flight > 0
            if sequence.state is not SequenceState.FINISHED:
                assert sequence.state is SequenceState.RUNNING
                assert end <= sequence.num_computed_tokens <= len(sequence.block_ids) * limits.block_size
