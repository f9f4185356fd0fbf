"""One step: the plan in the making (`StepBuilder`), the plan (`StepPlan`), its result (`StepResult`), and a plan that
waits for its result (`StepInFlight`).

Pure. Made by the scheduler, carried out by an executor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trio_llm.engine.scheduling.limits import SchedulerLimits, prompt_logprob_cost
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
    def is_decode(self) -> bool:
        """The chunk is the newest token of an answer. All other chunks are prefill: of prompts, or computed again."""
        return self.samples and self.count == 1 and self.start >= self.sequence.num_prompt_tokens

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
        """Positions of the prompt tokens whose log-probabilities this chunk gives, each from the row before it.

        Empty unless the request asked for them. To be read before the plan is committed.
        """
        if self.sequence.params.prompt_logprobs is None:
            return range(0)
        return _prompt_logprob_positions(self.sequence, self.start, self.count)


def _prompt_logprob_positions(sequence: Sequence, start: int, count: int) -> range:
    first = max(start + 1, sequence.next_prompt_logprob)
    return range(first, max(first, min(start + count + 1, sequence.num_prompt_tokens)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The chunks' tokens together stay within the budget; block tables cover every position computed."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Chunks, and so tokens, that are the newest of an answer; all other tokens are prefill."""
        return sum(chunk.is_decode for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: LogprobRow | None = None


@dataclass(frozen=True, slots=True)
class PooledVector:
    """The result of a pooling sequence."""

    data: bytes
    """float32, little-endian; every number is finite."""


@dataclass(frozen=True, slots=True)
class RowError:
    """This row failed; the other rows of the step are fine."""

    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[SampledToken | PooledVector | RowError, ...]
    """One per chunk with `samples`, in the plan's order; vectors for pooling sequences, tokens for all others."""
    prompt_logprobs: tuple[list[LogprobRow], ...] = ()
    """One list per chunk with `prompt_logprob_positions`, in the plan's order; one row per position."""


@dataclass(slots=True)
class StepBuilder:
    """Collects the chunks of a step while its budgets last."""

    tokens_left: int
    prompt_logprob_cost_left: int
    """In units of `prompt_logprob_cost`."""
    max_prefill_tokens: int | None = None
    """Tokens beside those of answers, if the step has any of those; None: the whole budget."""
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, sequence: Sequence) -> bool:
        """Compute as much of the sequence as the budgets allow.

        Returns:
            False, and nothing is added, if they do not allow one token.
        """
        uncomputed = sequence.num_uncomputed_tokens
        count = min(uncomputed, self.tokens_left)
        if sequence.params.prompt_logprobs is not None:
            count = self._take_prompt_logprobs(sequence, count, prompt_logprob_cost(sequence.params.prompt_logprobs))
        if count == 0:
            return False
        samples = count == uncomputed
        self.chunks.append(
            ScheduledChunk(sequence=sequence, start=sequence.num_computed_tokens, count=count, samples=samples)
        )
        self.tokens_left -= count
        sequence.num_computed_tokens += count
        sequence.num_pending_tokens += samples
        sequence.num_in_flight += 1
        return True

    def limit_prefills(self) -> None:
        """Leave prompts no more than `max_prefill_tokens`, if an answer goes on in this step."""
        if self.max_prefill_tokens is not None and any(chunk.is_decode for chunk in self.chunks):
            self.tokens_left = min(self.tokens_left, self.max_prefill_tokens)
            self.max_prefill_tokens = None

    def _take_prompt_logprobs(self, sequence: Sequence, count: int, cost: int) -> int:
        """Pay for the positions of a chunk of `count` tokens. Returns how many of the tokens the budget allows."""
        start = sequence.num_computed_tokens
        positions = _prompt_logprob_positions(sequence, start, count)
        num_affordable = self.prompt_logprob_cost_left // cost
        if len(positions) > num_affordable:
            positions = positions[:num_affordable]
            count = positions.stop - 1 - start
        self.prompt_logprob_cost_left -= len(positions) * cost
        return count


@dataclass(slots=True, eq=False)
class StepInFlight:
    plan: StepPlan
    left_behind: list[list[int]] = field(default_factory=list)
    """Blocks of sequences that are finished: this step may still write into them."""

    def check(self, limits: SchedulerLimits) -> None:
        """Assert that the plan is within the limits and that its sequences know of it."""
        plan = self.plan
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks) <= limits.max_num_seqs
        cost = sum(
            len(chunk.prompt_logprob_positions) * prompt_logprob_cost(chunk.sequence.params.prompt_logprobs or 0)
            for chunk in plan.chunks
        )
        assert cost <= limits.max_prompt_logprob_cost
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            assert chunk.count > 0
            assert sequence.num_in_flight > 0
            if sequence.state is not SequenceState.FINISHED:
                assert sequence.state is SequenceState.RUNNING
                assert end <= sequence.num_computed_tokens <= len(sequence.block_ids) * limits.block_size
