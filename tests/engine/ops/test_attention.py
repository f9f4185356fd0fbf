"""The reference attention over the paged cache, against plain dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.sequences import make_sequence
from trio_llm.engine.ops.attention import TorchAttention
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import HostBatch, lay_out

LAYERS, HEADS, DIM = 2, 2, 8
NUM_BLOCKS = 16
TRASH = NUM_BLOCKS


def dense(query: Tensor, key: Tensor, value: Tensor, *, window: int | None, softcap: float | None) -> Tensor:
    """Position by position, head by head: query [N, Hq, D] ends where key and value [C, H, D] end."""
    num_queries, num_query_heads, _ = query.shape
    context, num_heads, _ = key.shape
    out = torch.empty_like(query)
    for n in range(num_queries):
        last = context - num_queries + n
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(num_query_heads):
            kv_head = head // (num_query_heads // num_heads)
            scores = key[first : last + 1, kv_head].double() @ query[n, head].double() * DIM**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[n, head] = (torch.softmax(scores, 0) @ value[first : last + 1, kv_head].double()).float()
    return out


def new_cache(fill: float = 7.0) -> Tensor:
    return torch.full((NUM_BLOCKS + 1, LAYERS, 2, HEADS, BLOCK_SIZE, DIM), fill)


@dataclass
class Row:
    """A sequence with K and V of its own, of which a step computes the last `count` tokens."""

    key: Tensor  # [C, H, D]
    value: Tensor
    count: int
    table: list[int]

    @property
    def context(self) -> int:
        return len(self.key)

    @property
    def chunk(self) -> ScheduledChunk:
        sequence = make_sequence(str(self.table), [0] * self.context, block_ids=self.table)
        return ScheduledChunk(sequence, self.context - self.count, self.count, samples=True)

    def earlier(self) -> ScheduledChunk:
        """All before the chunk, as a step of its own."""
        sequence = make_sequence(str(self.table), [0] * self.context, block_ids=self.table)
        return ScheduledChunk(sequence, 0, self.context - self.count, samples=False)


def make_rows(shapes: list[tuple[int, int]]) -> list[Row]:
    """Rows of (earlier tokens, count), whose blocks lie anywhere in the cache."""
    order = torch.randperm(NUM_BLOCKS).tolist()
    rows = []
    for earlier, count in shapes:
        key, value = torch.randn(2, earlier + count, HEADS, DIM)
        rows.append(Row(key, value, count, [order.pop() for _ in range(-(-(earlier + count) // BLOCK_SIZE))]))
    return rows


def begin(attention: TorchAttention, kv: Tensor, chunks: list[ScheduledChunk], *, pad_rows_to: int = 0) -> HostBatch:
    host = lay_out(StepPlan(tuple(chunks)), {}, pad_rows_to=pad_rows_to, trash_block=TRASH)
    attention.begin(StepBuffers(torch.device("cpu"), max_rows=1, depth=0).upload(host), kv)
    return host


def in_batch_order(host: HostBatch, parts: list[Tensor]) -> Tensor:
    """What belongs to the chunks, [count, heads, D] each, as one tensor of all tokens; random numbers for padding."""
    whole = torch.randn(len(host.token_ids), *parts[0].shape[1:], dtype=parts[0].dtype)
    for first, part in zip(host.first_tokens, parts, strict=True):
        whole[first : first + len(part)] = part
    return whole


def write_earlier(kv: Tensor, rows: list[Row], layer: int) -> None:
    attention = TorchAttention()
    rows = [row for row in rows if row.context > row.count]
    if rows:
        host = begin(attention, kv, [row.earlier() for row in rows])
        keys, values = ([part[: row.context - row.count] for part, row in pairs] for pairs in _kv_of(rows))
        attention.write(layer, in_batch_order(host, keys), in_batch_order(host, values))


def _kv_of(rows: list[Row]) -> tuple[list[tuple[Tensor, Row]], list[tuple[Tensor, Row]]]:
    return [(row.key, row) for row in rows], [(row.value, row) for row in rows]


def attend(
    kv: Tensor,
    rows: list[Row],
    queries: list[Tensor],
    *,
    layer: int = 1,
    pad_rows_to: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    """One step over the rows; what their chunks get."""
    attention = TorchAttention()
    host = begin(attention, kv, [row.chunk for row in rows], pad_rows_to=pad_rows_to)
    keys, values = ([part[row.context - row.count :] for part, row in pairs] for pairs in _kv_of(rows))
    attention.write(layer, in_batch_order(host, keys), in_batch_order(host, values))
    query = in_batch_order(host, queries)
    out = attention.attend(layer, query, scale=DIM**-0.5, window=window, softcap=softcap)
    assert out.shape == query.shape
    assert out.is_contiguous()
    assert out.isfinite().all(), "rows that pad give numbers, too"
    return [out[first : first + row.count] for first, row in zip(host.first_tokens, rows, strict=True)]


def queries_of(rows: list[Row], group_size: int) -> list[Tensor]:
    return [torch.randn(row.count, HEADS * group_size, DIM) for row in rows]


LIMITS = {
    "group_size": st.integers(1, 3),
    "window": st.none() | st.integers(1, 50),
    "softcap": st.none() | st.just(2.0),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=4), pad_rows_to=st.integers(0, 6), **LIMITS)
def test_decode_rows_of_different_lengths_equal_dense_attention(
    lengths: list[int], pad_rows_to: int, group_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    kv, rows = new_cache(), make_rows([(length - 1, 1) for length in lengths])
    write_earlier(kv, rows, 1)
    queries = queries_of(rows, group_size)

    out = attend(kv, rows, queries, pad_rows_to=pad_rows_to, window=window, softcap=softcap)

    for row, query, got in zip(rows, queries, out, strict=True):
        expected = dense(query, row.key, row.value, window=window, softcap=softcap)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 70), count=st.integers(1, 40), **LIMITS)
def test_a_chunk_of_a_prompt_equals_dense_attention(
    start: int, count: int, group_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    kv, rows = new_cache(), make_rows([(start, count)])
    write_earlier(kv, rows, 0)
    queries = queries_of(rows, group_size)

    (out,) = attend(kv, rows, queries, layer=0, window=window, softcap=softcap)

    expected = dense(queries[0], rows[0].key, rows[0].value, window=window, softcap=softcap)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 60), st.just(1) | st.integers(1, 40)), min_size=2, max_size=4),
    pad_rows_to=st.integers(0, 6),
    **LIMITS,
)
def test_decode_rows_and_chunks_in_one_step_equal_dense_attention(
    shapes: list[tuple[int, int]],
    pad_rows_to: int,
    group_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kv, rows = new_cache(), make_rows(shapes)
    write_earlier(kv, rows, 1)
    queries = queries_of(rows, group_size)

    out = attend(kv, rows, queries, pad_rows_to=pad_rows_to, window=window, softcap=softcap)

    for row, query, got in zip(rows, queries, out, strict=True):
        expected = dense(query, row.key, row.value, window=window, softcap=softcap)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_row_sees_what_another_row_of_the_step_writes_into_a_block_they_share() -> None:
    torch.manual_seed(0)
    kv, (first,) = new_cache(), make_rows([(0, BLOCK_SIZE + 5)])
    # A second sequence with the same first block, found in the prefix cache while the step that fills it is planned.
    key, value = (torch.cat((part[:BLOCK_SIZE], torch.randn(3, HEADS, DIM))) for part in (first.key, first.value))
    spare = next(block for block in range(NUM_BLOCKS) if block not in first.table)
    second = Row(key, value, 3, [first.table[0], spare])
    queries = queries_of([second, first], 2)

    out = attend(kv, [second, first], queries)

    for row, query, got in zip([second, first], queries, out, strict=True):
        expected = dense(query, row.key, row.value, window=None, softcap=None)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_what_is_written_lies_in_its_slots_and_nothing_else_changes() -> None:
    kv = new_cache()
    key, value = torch.randn(2, 40, HEADS, DIM)
    attention = TorchAttention()
    begin(attention, kv, [Row(key, value, 40, [3, 0]).chunk])

    attention.write(1, key, value)

    assert torch.equal(kv[3, 1, 0], key[:32].transpose(0, 1))
    assert torch.equal(kv[0, 1, 1, :, :8], value[32:].transpose(0, 1))
    assert not kv[0, 1, :, :, 8:].any()
    others = [block for block in range(NUM_BLOCKS + 1) if block not in (0, 3)]
    assert (kv[others] == 7).all()
    assert not kv[[0, 3], 0].any(), "another layer of blocks that are begun: cleared"


@pytest.mark.parametrize("start", [31, 32, 33])
def test_a_step_clears_the_blocks_that_it_begins_and_no_others(start: int) -> None:
    kv = new_cache(float("nan"))
    key, value = torch.randn(2, start + 40, HEADS, DIM)

    begin(TorchAttention(), kv, [Row(key, value, 40, [5, 2, 9]).chunk])

    cleared = {block for block in range(NUM_BLOCKS + 1) if not kv[block].isnan().any()}
    begun = {[5, 2, 9][at // BLOCK_SIZE] for at in range(start, start + 40) if at % BLOCK_SIZE == 0}
    assert cleared == begun
    assert kv[[block for block in range(NUM_BLOCKS + 1) if block not in begun]].isnan().all()


def test_nan_of_an_earlier_owner_does_not_reach_a_new_one() -> None:
    torch.manual_seed(0)
    kv, rows = new_cache(float("nan")), make_rows([(0, 5), (0, 33), (0, 1)])
    queries = queries_of(rows, 1)

    out = attend(kv, rows, queries)

    for row, query, got in zip(rows, queries, out, strict=True):
        expected = dense(query, row.key, row.value, window=None, softcap=None)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_pad_change_no_bit_of_the_others_and_write_into_the_trash_block_alone() -> None:
    torch.manual_seed(0)
    rows = make_rows([(70, 1), (3, 9), (20, 1)])
    queries = queries_of(rows, 2)
    caches, outs = [], []
    for pad_rows_to in (0, 8):
        kv = new_cache()
        write_earlier(kv, rows, 1)
        outs.append(attend(kv, rows, queries, pad_rows_to=pad_rows_to))
        caches.append(kv)

    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert torch.equal(caches[0][:TRASH], caches[1][:TRASH])


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_bfloat16_keeps_the_type_and_stays_close_to_float32(softcap: float | None) -> None:
    torch.manual_seed(0)
    kv, rows = new_cache().bfloat16(), make_rows([(0, 50)])
    halves = [Row(row.key.bfloat16(), row.value.bfloat16(), row.count, row.table) for row in rows]
    queries = queries_of(rows, 2)

    (out,) = attend(kv, halves, [query.bfloat16() for query in queries], softcap=softcap)

    assert out.dtype == torch.bfloat16
    expected = dense(queries[0], rows[0].key, rows[0].value, window=None, softcap=softcap)
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
