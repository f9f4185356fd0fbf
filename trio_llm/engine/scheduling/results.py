"""What the result of a step means for the front end: the rows that the scheduler makes, faults of single rows, counts.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.sequence_table import SequenceTable
from trio_llm.engine.scheduling.step import PooledVector, RowError, SampledToken, StepPlan, StepResult
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import EngineCoreOutput, SchedulerStats

__all__ = [
    "StepCounts",
    "expired_row",
    "final_row",
    "find_fault",
    "pooled_row",
    "prompt_logprob_rows",
    "token_row",
    "unknown_row",
]

_ROW_PROMPT_LOGPROBS: Final = 128
"""Prompt tokens whose log-probabilities go into one row: the front end takes about 2 ms for so many."""


@dataclass(slots=True)
class StepCounts:
    """What the scheduler counts for `SchedulerStats`."""

    num_preempted: int = 0
    """Since the engine started."""
    num_prompt_tokens: int = 0
    """Computed in the last committed step."""
    num_cached_now: int = 0
    """Tokens found in the cache for sequences that were admitted since the last committed step."""
    num_cached_tokens: int = 0
    """The same between the last committed step and the one before it."""

    def count_step(self, plan: StepPlan) -> None:
        """A step is committed."""
        self.num_prompt_tokens = 0
        for chunk in plan.chunks:
            num_left = chunk.sequence.num_prompt_tokens - chunk.start
            if num_left > 0:
                self.num_prompt_tokens += min(chunk.count, num_left)
        self.num_cached_tokens, self.num_cached_now = self.num_cached_now, 0

    def make_stats(
        self, sequences: SequenceTable, blocks: SequenceBlocks, limits: SchedulerLimits, *, admits_new: bool
    ) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(sequences.running),
            num_waiting=len(sequences.waiting) + len(sequences.suspended),
            num_free_blocks=blocks.num_free,
            num_blocks=limits.num_blocks,
            num_preempted=self.num_preempted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_cached_blocks=blocks.num_cached,
            num_deferred=len(sequences.suspended) + (0 if admits_new else sequences.num_new),
        )


def prompt_logprob_rows(plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
    """The rows with the prompt log-probabilities of a step; none for sequences that are finished."""
    rows = []
    chunks = [(chunk, positions) for chunk in plan.chunks if (positions := chunk.prompt_logprob_positions)]
    for (chunk, positions), logprobs in zip(chunks, result.prompt_logprobs, strict=True):
        assert len(logprobs) == len(positions), "not one row of log-probabilities per position"
        if chunk.sequence.state is SequenceState.FINISHED:
            continue
        chunk.sequence.next_prompt_logprob = positions.stop
        for first in range(0, len(logprobs), _ROW_PROMPT_LOGPROBS):
            rows.append(
                EngineCoreOutput(
                    request_id=chunk.sequence.request_id,
                    start=chunk.sequence.next_start,
                    new_token_ids=[],
                    prompt_logprobs=logprobs[first : first + _ROW_PROMPT_LOGPROBS],
                    prompt_logprobs_start=positions.start + first,
                )
            )
    return rows


def token_row(
    sequence: Sequence, sampled: SampledToken, *, finish_reason: FinishReason | None, stop_reason: int | None
) -> EngineCoreOutput:
    """The row with the newest token of a sequence, which is among its tokens already."""
    start = sequence.next_start - 1
    is_last = finish_reason is not None
    return EngineCoreOutput(
        request_id=sequence.request_id,
        start=start,
        new_token_ids=[sampled.token_id],
        logprobs=None if sampled.logprobs is None else [sampled.logprobs],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=(sequence.num_cached_tokens or 0) if start == 0 else 0,
        goes_on=sequence.is_resumable and is_last,
        queued_s=sequence.queued_s if start == 0 else None,
        scheduled_s=sequence.scheduled_s if start == 0 else None,
        num_preemptions=sequence.num_preemptions if is_last else 0,
    )


def pooled_row(sequence: Sequence, vector: PooledVector) -> EngineCoreOutput:
    """The only row of a finished pooling sequence."""
    return EngineCoreOutput(
        sequence.request_id,
        sequence.next_start,
        new_token_ids=[],
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        pooled=vector.data,
        queued_s=sequence.queued_s,
        scheduled_s=sequence.scheduled_s,
        num_preemptions=sequence.num_preemptions,
    )


def final_row(sequence: Sequence, *, error: str | None = None, is_expired: bool = False) -> EngineCoreOutput:
    """The last row of a finished sequence, without a token."""
    reason, start = sequence.finish_reason, sequence.next_start
    return EngineCoreOutput(
        sequence.request_id,
        start,
        new_token_ids=[],
        finish_reason=reason,
        error=error,
        is_expired=is_expired,
        num_preemptions=sequence.num_preemptions,
    )


def expired_row(sequence: Sequence) -> EngineCoreOutput:
    """The only row of a sequence that was not begun in time."""
    error = "the deadline of this request passed while it waited for its turn; nothing was computed"
    return final_row(sequence, error=error, is_expired=True)


def unknown_row(request_id: str) -> EngineCoreOutput:
    """The row that confirms the abort of a request that is not there."""
    return EngineCoreOutput(request_id, 0, new_token_ids=[], finish_reason="abort")


def find_fault(outcome: SampledToken | PooledVector | RowError, limits: SchedulerLimits) -> str | None:
    """Why the sequence of this row cannot go on, or None."""
    if isinstance(outcome, RowError):
        return outcome.message
    if isinstance(outcome, SampledToken) and not 0 <= outcome.token_id < limits.logits_width:
        return (
            f"the model gave token {outcome.token_id}, which is outside 0 to {limits.logits_width - 1}; "
            "this request cannot go on"
        )
    return None
