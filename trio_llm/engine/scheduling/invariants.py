"""What must hold of a scheduler between any two of its calls.

Pure. Used by `Scheduler.check`, which tests call after every step.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.sequence_table import SequenceTable
from trio_llm.engine.scheduling.step import StepInFlight

__all__ = ["check_scheduler"]


def check_scheduler(
    limits: SchedulerLimits, sequences: SequenceTable, blocks: SequenceBlocks, in_flight: Collection[StepInFlight]
) -> None:
    """Assert all invariants. Costs a walk over all sequences, blocks and steps in flight."""
    sequences.check()
    idle = [sequence for sequence in sequences if sequence.state is SequenceState.IDLE]
    for sequence in (*sequences.waiting, *sequences.running, *sequences.suspended):
        assert sequence.num_prompt_tokens <= len(sequence.token_ids) < limits.longest(sequence.pooling)
    not_running = [*sequences.waiting, *sequences.suspended, *idle]
    for sequence in not_running:
        assert sequence.num_in_flight == sequence.num_pending_tokens == 0
    blocks.idle.check(not_running, limits.block_size)
    assert len(sequences.running) <= limits.max_num_seqs
    for sequence in sequences.running:
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= limits.longest(sequence.pooling)
        assert 0 < sequence.next_prompt_logprob <= sequence.num_prompt_tokens
        assert sequence.num_computed_tokens <= len(sequence.block_ids) * limits.block_size
        assert sequence.num_published_blocks <= len(sequence.block_ids)
    left_behind = (block_ids for step in in_flight for block_ids in step.left_behind)
    held = chain((sequence.block_ids for sequence in sequences), left_behind)
    blocks.check(chain.from_iterable(held))
    for step in in_flight:
        step.check(limits)
