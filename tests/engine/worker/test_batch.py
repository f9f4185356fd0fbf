"""A plan as tensors: every token has its id, position, slot and exactly one place in attention."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.batch import build_batch
from trio_llm.sampling import SamplingParams

CPU = torch.device("cpu")


def chunk(start: int, count: int, *, first_block: int, samples: bool = True) -> ScheduledChunk:
    total = start + count
    sequence = Sequence(
        request_id=str(first_block),
        token_ids=[1000 * first_block + position for position in range(total)],
        num_prompt_tokens=total,
        params=SamplingParams(),
        block_ids=[first_block + i for i in range(-(-total // 32) + 1)],  # one block ahead of its tokens
    )
    return ScheduledChunk(sequence, start, count, samples)


SHAPE = st.tuples(st.integers(0, 200), st.just(1) | st.integers(1, 70), st.booleans())
"""Start, count, samples."""


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(SHAPE, min_size=1, max_size=6))
def test_every_token_is_computed_once_where_it_belongs(shapes: list[tuple[int, int, bool]]) -> None:
    chunks = tuple(
        chunk(start, count, first_block=100 * (i + 1), samples=samples)
        for i, (start, count, samples) in enumerate(shapes)
    )
    batch = build_batch(StepPlan(chunks), CPU)

    expected = [(c, position) for c in chunks for position in range(c.start, c.start + c.count)]
    assert batch.positions.tolist() == [position for _, position in expected]
    assert batch.token_ids.tolist() == [c.sequence.token_ids[position] for c, position in expected]
    slots = list(zip(batch.attention.slot_blocks.tolist(), batch.attention.slot_offsets.tolist(), strict=True))
    assert slots == [(c.sequence.block_ids[position // 32], position % 32) for c, position in expected]
    assert len(set(slots)) == len(slots)
    assert batch.attention.fresh_blocks.tolist() == [block for block, offset in slots if offset == 0]
    assert [expected[row][0] for row in batch.logits_rows.tolist()] == [c for c in chunks if c.samples]
    assert all(expected[row][1] == expected[row][0].start + expected[row][0].count - 1 for row in batch.logits_rows)

    seen = []
    for rows in batch.attention.rows:
        for tokens, positions, table in zip(rows.tokens, rows.positions, rows.blocks.tolist(), strict=True):
            seen += tokens.tolist()
            assert [expected[token][1] for token in tokens] == positions.tolist()
            own = expected[int(tokens[0])][0].sequence.block_ids
            needed = int(positions[-1]) // 32 + 1
            assert table[:needed] == own[:needed]
            assert set(table) <= set(own), "a row reads a block of another"
            assert len(table) <= 2 * needed, "padding more than doubles what is read"
    assert sorted(seen) == list(range(len(expected)))
