"""Rows that the scheduler makes beside those with new tokens: last rows, and log-probabilities of prompts.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from typing import Final

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.engine.scheduling.step import PooledVector, RowError, SampledToken, StepPlan, StepResult
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["final_row", "find_fault", "take_scores"]

_ROW_SCORES: Final = 128
"""Prompt tokens whose log-probabilities go into one row: naming them takes the front end about two milliseconds."""


def take_scores(plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
    """Rows with the log-probabilities that a step gave for prompts."""
    rows = []
    chunks = [(chunk, positions) for chunk in plan.chunks if (positions := chunk.scored)]
    for (chunk, positions), scores in zip(chunks, result.scored, strict=True):
        assert len(scores) == len(positions), "not one score a position"
        if chunk.sequence.state is SequenceState.FINISHED:
            continue
        chunk.sequence.num_scored_tokens = positions.stop
        for first in range(0, len(scores), _ROW_SCORES):
            rows.append(
                EngineCoreOutput(
                    request_id=chunk.sequence.request_id,
                    start=chunk.sequence.next_start,
                    new_token_ids=[],
                    prompt_logprobs=scores[first : first + _ROW_SCORES],
                    prompt_logprobs_start=positions.start + first,
                )
            )
    return rows


def final_row(sequence: Sequence, *, error: str | None = None, is_expired: bool = False) -> EngineCoreOutput:
    """The last row of a finished sequence, without a token."""
    reason, start = sequence.finish_reason, sequence.next_start
    return EngineCoreOutput(
        sequence.request_id, start, new_token_ids=[], finish_reason=reason, error=error, is_expired=is_expired
    )


def find_fault(outcome: SampledToken | PooledVector | RowError, limits: SchedulerLimits) -> str | None:
    """Why a row cannot go on, or None."""
    if isinstance(outcome, RowError):
        return outcome.message
    if isinstance(outcome, SampledToken) and not 0 <= outcome.token_id < limits.logits_width:
        return (
            f"the model gave token {outcome.token_id}, which is outside 0 to {limits.logits_width - 1}; "
            "this request cannot go on"
        )
    return None
