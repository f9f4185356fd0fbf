"""A plan as numbers, against a reference that takes one token after the other; and what the device gets of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import HostBatch, lay_out
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING

TRASH = 99
ARRAYS = (
    "token_ids",
    "token_source",
    "positions",
    "slots",
    "query_start",
    "context",
    "block_start",
    "logits_rows",
    "blocks",
)


def chunk(
    start: int, count: int, *, first_block: int, samples: bool = True, is_pending: bool = False, embeds: bool = False
) -> ScheduledChunk:
    """Positions `start` to `start + count - 1`; the sequence has a block more than it needs for them.

    Args:
        is_pending: the step before samples the last token.
    """
    total = start + count
    sequence = Sequence(
        request_id=str(first_block),
        token_ids=[1000 * first_block + position for position in range(total - is_pending)],
        num_prompt_tokens=total,
        params=NO_SAMPLING if embeds else SamplingParams(),
        block_ids=[first_block + i for i in range(-(-total // 32) + 1)],
        pooling=PoolingParams(task="embed") if embeds else None,
    )
    return ScheduledChunk(sequence, start, count, samples)


CHUNK = st.fixed_dictionaries(
    {
        "start": st.integers(0, 200),
        "count": st.just(1) | st.integers(1, 70),
        "samples": st.booleans(),
        "is_pending": st.booleans(),
        "embeds": st.booleans(),
    }
)


def make_plan(shapes: list[dict[str, int]]) -> StepPlan:
    return StepPlan(tuple(chunk(**shape, first_block=100 * (i + 1)) for i, shape in enumerate(shapes)))  # type: ignore[arg-type]


def sampled_rows(plan: StepPlan) -> dict[Sequence, int]:
    """In another order than the plan's."""
    sequences = [one.sequence for one in reversed(plan.chunks)]
    return {sequence: row for row, sequence in enumerate(sequences)}


@dataclass
class Expected:
    """Taken together token by token: slow, and simple enough to be believed."""

    tokens: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Id, source, position and slot of each."""
    rows: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Number of tokens, context and block table of each."""
    ends: dict[int, int] = field(default_factory=dict)
    """The last token of each chunk of the plan, by the chunk's index."""

    def add(self, index: int, one: ScheduledChunk, source: dict[Sequence, int]) -> None:
        for position in range(one.start, one.start + one.count):
            known = position < len(one.sequence.token_ids)
            self.tokens.append(
                (
                    one.sequence.token_ids[position] if known else 0,
                    -1 if known else source[one.sequence],
                    position,
                    one.sequence.block_ids[position // 32] * 32 + position % 32,
                )
            )
        end = one.start + one.count
        self.rows.append((one.count, end, one.sequence.block_ids[: (end - 1) // 32 + 1]))
        self.ends[index] = len(self.tokens) - 1


def naive(plan: StepPlan, pad_rows_to: int) -> Expected:
    expected, source = Expected(), sampled_rows(plan)
    for index, one in enumerate(plan.chunks):
        if one.count == 1:
            expected.add(index, one, source)
    for row in range(pad_rows_to - len(plan.chunks)):
        expected.tokens.append((0, -1, 0, TRASH * 32 + row % 32))
        expected.rows.append((1, 0, []))
    for index, one in enumerate(plan.chunks):
        if one.count > 1:
            expected.add(index, one, source)
    return expected


@settings(max_examples=200, deadline=None)
@given(shapes=st.lists(CHUNK, min_size=1, max_size=6), pad_rows_to=st.integers(0, 40))
def test_every_token_and_row_is_laid_out_as_the_reference_says(shapes: list[dict[str, int]], pad_rows_to: int) -> None:
    plan = make_plan(shapes)
    expected = naive(plan, pad_rows_to)

    batch = lay_out(plan, sampled_rows(plan), pad_rows_to=pad_rows_to, trash_block=TRASH)

    columns = (batch.token_ids, batch.token_source, batch.positions, batch.slots)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected.tokens
    counts = np.diff(batch.query_start).tolist()
    tables = [batch.blocks[a:b].tolist() for a, b in zip(batch.block_start, batch.block_start[1:], strict=False)]
    assert (batch.query_start[0], batch.block_start[0]) == (0, 0)
    assert list(zip(counts, batch.context.tolist(), tables, strict=True)) == expected.rows
    assert batch.block_start[-1] == len(batch.blocks)
    assert batch.num_decode == counts.count(1)
    assert batch.max_query == max(counts)
    wanted = [expected.ends[index] for index, one in enumerate(plan.chunks) if one.needs_logits]
    assert batch.logits_rows.tolist() == wanted + [0] * (pad_rows_to - len(wanted))
    firsts = [expected.ends[index] - one.count + 1 for index, one in enumerate(plan.chunks)]
    assert list(batch.first_tokens) == firsts


@settings(max_examples=50, deadline=None)
@given(shapes=st.lists(CHUNK, min_size=1, max_size=6), pad_rows_to=st.integers(0, 40))
def test_rows_with_one_token_come_first_and_no_token_shares_a_slot(
    shapes: list[dict[str, int]], pad_rows_to: int
) -> None:
    plan = make_plan(shapes)

    batch = lay_out(plan, sampled_rows(plan), pad_rows_to=pad_rows_to, trash_block=TRASH)

    counts = np.diff(batch.query_start)
    assert (counts[: batch.num_decode] == 1).all()
    assert (counts[batch.num_decode :] > 1).all()
    real = batch.slots[batch.slots // 32 != TRASH].tolist()
    assert len(set(real)) == len(real) == plan.num_tokens
    padding = batch.slots[np.flatnonzero(np.repeat(batch.context == 0, counts))]
    assert set((padding // 32).tolist()) <= {TRASH}


def test_within_a_bucket_everything_but_the_tables_lies_in_the_same_place() -> None:
    def places(lengths: list[int]) -> list[int]:
        plan = StepPlan(tuple(chunk(length - 1, 1, first_block=100 * i) for i, length in enumerate(lengths)))
        batch = lay_out(plan, {}, pad_rows_to=8, trash_block=TRASH)
        address = batch.flat.__array_interface__["data"][0]
        return [getattr(batch, name).__array_interface__["data"][0] - address for name in ARRAYS]

    assert places([1]) == places([200, 33, 7]) == places([64] * 8)


def layouts() -> list[HostBatch]:
    plan = make_plan(
        [
            {"start": 70, "count": 1, "samples": True, "is_pending": True, "embeds": False},
            {"start": 0, "count": 45, "samples": True, "is_pending": False, "embeds": False},
            {"start": 3, "count": 1, "samples": False, "is_pending": False, "embeds": False},
        ]
    )
    return [lay_out(plan, sampled_rows(plan), pad_rows_to=pad, trash_block=TRASH) for pad in (0, 5)]


@pytest.mark.parametrize("host", layouts(), ids=["as it is", "padded"])
def test_the_device_gets_every_array_as_it_is(host: HostBatch) -> None:
    buffers = StepBuffers(torch.device("cpu"), max_rows=4, depth=1)

    batch = buffers.upload(host)

    for name in ARRAYS:
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int32, name
        assert tensor.tolist() == getattr(host, name).tolist(), name
    assert (batch.num_decode, batch.max_query) == (host.num_decode, host.max_query)
    assert batch.host is host


def test_on_a_cpu_nothing_is_copied_and_the_sampled_ids_stay_where_they_are() -> None:
    buffers = StepBuffers(torch.device("cpu"), max_rows=4, depth=1)
    address = buffers.sampled_ids.data_ptr()

    for host in layouts():
        assert buffers.upload(host).token_ids.data_ptr() == host.flat.__array_interface__["data"][0]

    assert buffers.sampled_ids.data_ptr() == address
    assert buffers.sampled_ids.shape == (4,)


def test_laying_out_needs_no_torch() -> None:
    code = "import sys, trio_llm.engine.worker.host_batch as m; assert 'torch' not in sys.modules; print(m.lay_out)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
