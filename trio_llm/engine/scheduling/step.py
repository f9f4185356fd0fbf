"""One step: the plan (`StepPlan`), what comes back (`StepResult`), the plan in the making (`StepBuilder`), and the step
in flight until its result is in.

Pure. Made by the scheduler, carried out by an executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.wire.messages import LogprobRow

__all__ = [
    "PooledVector",
    "RowError",
    "SampledToken",
    "ScheduledChunk",
    "StepBuilder",
    "StepInFlight",
    "StepPlan",
    "StepResult",
]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one sequence that one step computes: positions start to start + count - 1."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """The chunk reaches the last token: the next one is sampled from its last row, or the sequence is pooled."""

    @property
    def needs_logits(self) -> bool:
        """The model's head runs over the last row. An embedding is made without it."""
        pooling = self.sequence.pooling
        return self.samples and (pooling is None or pooling.task == "classify")

    @property
    def follows_pending(self) -> bool:
        """The chunk's last token is the one that the step before samples for this sequence: only the executor can know
        it. To be read at launch."""
        return self.start + self.count > len(self.sequence.token_ids)

    @property
    def prompt_logprob_positions(self) -> range:
        """Positions of the prompt tokens whose log-probabilities this chunk gives: its rows come right before them.

        Empty unless the request asked for them. To be read before the plan is committed.
        """
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        start = max(self.start + 1, sequence.next_prompt_logprob)
        return range(start, max(start, min(self.start + self.count + 1, sequence.num_prompt_tokens)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The chunks' tokens together stay within the budget; block tables cover every position computed."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: LogprobRow | None = None


@dataclass(frozen=True, slots=True)
class PooledVector:
    """What a pooling sequence is computed for."""

    data: bytes
    """float32, little-endian; every number is finite."""


@dataclass(frozen=True, slots=True)
class RowError:
    """This row failed; the others of the step are fine."""

    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[SampledToken | PooledVector | RowError, ...]
    """One a chunk with `samples`, in the plan's order; vectors are for pooling sequences, tokens for all others."""
    prompt_logprobs: tuple[list[LogprobRow], ...] = ()
    """One a chunk with `scored` positions, in the plan's order; one row a position."""


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
