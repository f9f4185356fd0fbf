"""When a sequence ends: at a stop token, at its number of tokens, or at the model's length.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.outputs import FinishReason

__all__ = ["find_end", "must_await_pending"]


def find_end(sequence: Sequence, limits: SchedulerLimits) -> tuple[FinishReason | None, int | None]:
    """Whether the last token ends the sequence: the finish reason, and the stop token of the request if it was one."""
    params = sequence.params
    token_id = sequence.token_ids[-1]
    if sequence.num_output_tokens >= params.min_tokens:
        if token_id in limits.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
    assert params.max_tokens is not None
    if sequence.num_output_tokens >= params.max_tokens or len(sequence.token_ids) >= limits.max_model_len:
        return "length", None
    return None, None


def must_await_pending(sequence: Sequence, limits: SchedulerLimits) -> bool:
    """Whether nothing may be computed behind the tokens in flight: they end the sequence by its length, whatever they
    are, or it is a session, which goes on behind its answer, so that nothing may be computed there that is dropped."""
    if sequence.is_resumable:
        return True
    assert sequence.params.max_tokens is not None
    num_output_tokens = sequence.num_output_tokens + sequence.num_pending_tokens
    return num_output_tokens >= sequence.params.max_tokens or sequence.num_tokens >= limits.max_model_len
