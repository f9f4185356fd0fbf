"""Pooling requests in the scheduler: which of them a model can take, and the one row that each gets.

Pure. Used by the engine core and the scheduler. To both, such a request is a prompt without an answer.
"""

from __future__ import annotations

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreRequest, ModelConfig

__all__ = ["find_task_problem", "pooled_row"]


def find_task_problem(request: EngineCoreRequest, model: ModelConfig) -> str | None:
    """Why the model cannot do what a request is for, or None. The front end should have seen it."""
    pooling = request.pooling_params
    task = "generate" if pooling is None else pooling.task
    if task not in model.tasks:
        return f"the model cannot {task}; it can {', '.join(model.tasks)}"
    if pooling is not None and (request.resumable or request.output_token_ids):
        return "a pooling request has neither inputs that follow nor tokens that were generated"
    return None


def pooled_row(sequence: Sequence, vector: PooledVector) -> EngineCoreOutput:
    """The only row of a finished pooling sequence."""
    return EngineCoreOutput(
        sequence.request_id,
        sequence.next_start,
        new_token_ids=[],
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        pooled=vector.data,
    )
