"""What must hold of a scheduler between any two of its calls.

Pure. Used by `Scheduler.check`, which tests call after every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceQueue, SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.step import StepInFlight

__all__ = ["check_scheduler"]


def check_scheduler(
    limits: SchedulerLimits,
    sequences: Mapping[str, Sequence],
    *,
    waiting: SequenceQueue,
    running: SequenceQueue,
    blocks: SequenceBlocks,
    in_flight: Iterable[StepInFlight],
) -> None:
    """Assert it. Costs a walk over everything."""
    for queue in (waiting, running):
        orders = [sequence.order for sequence in queue]
        assert orders == sorted(set(orders)), "a queue is out of order"
    idle = [sequence for sequence in sequences.values() if sequence.state is SequenceState.IDLE]
    assert len(waiting) + len(running) + len(idle) == len(sequences), "a sequence is lost"
    for sequence in (*waiting, *running):
        assert sequences[sequence.request_id] is sequence
        assert sequence.num_prompt_tokens <= len(sequence.token_ids) < limits.longest(sequence.pooling)
    for sequence in (*waiting, *idle):
        assert sequence.num_in_flight == sequence.num_pending_tokens == 0
    for sequence in waiting:
        assert sequence.state is SequenceState.WAITING
    blocks.kept.check([*waiting, *idle], limits.block_size)
    assert len(running) <= limits.max_num_seqs
    for sequence in running:
        assert sequence.state is SequenceState.RUNNING
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= limits.longest(sequence.pooling)
        assert 0 < sequence.num_scored_tokens <= sequence.num_prompt_tokens
        assert sequence.num_computed_tokens <= len(sequence.block_ids) * limits.block_size
        assert sequence.num_published_blocks <= len(sequence.block_ids)
    left_behind = (block_ids for step in in_flight for block_ids in step.left_behind)
    held = chain((sequence.block_ids for sequence in sequences.values()), left_behind)
    blocks.check(chain.from_iterable(held))
    for step in in_flight:
        step.check(limits)
