"""The paged reference operations against plain dense attention."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trio_llm.engine.ops.attention import BLOCK_SIZE, AttentionRows, attend, clear_blocks, gather_kv, write_kv

LAYERS, HEADS, DIM = 2, 2, 8


def dense(query: Tensor, key: Tensor, value: Tensor, **how: float | None) -> Tensor:
    """Position by position, head by head: query [N, Hq, D] ends where key and value [C, H, D] end."""
    num_queries, num_query_heads, _ = query.shape
    context, num_heads, _ = key.shape
    window, softcap = how.get("window"), how.get("softcap")
    out = torch.empty_like(query)
    for n in range(num_queries):
        last = context - num_queries + n
        first = 0 if window is None else max(0, last - int(window) + 1)
        for head in range(num_query_heads):
            kv_head = head // (num_query_heads // num_heads)
            scores = key[first : last + 1, kv_head].double() @ query[n, head].double() * DIM**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[n, head] = (torch.softmax(scores, 0) @ value[first : last + 1, kv_head].double()).float()
    return out


def new_cache(num_blocks: int) -> Tensor:
    return torch.full((num_blocks, LAYERS, 2, HEADS, BLOCK_SIZE, DIM), 7.0)


def slots(table: list[int], start: int, end: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(start, end)
    return torch.tensor(table)[at // BLOCK_SIZE], at % BLOCK_SIZE


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    group_size=st.integers(1, 3),
    window=st.none() | st.integers(1, 50),
    softcap=st.none() | st.just(2.0),
    seed=st.integers(0, 2**31),
)
def test_decode_rows_of_different_lengths_equal_dense_attention(
    lengths: list[int], group_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    kv, layer, longest = new_cache(16), 1, -(-max(lengths) // BLOCK_SIZE)
    order = torch.randperm(16).tolist()
    query = torch.randn(len(lengths), HEADS * group_size, DIM)
    tables, expected = [], []
    for row, length in enumerate(lengths):
        table = [order.pop() for _ in range(-(-length // BLOCK_SIZE))]
        tables.append(table + table[:1] * (longest - len(table)))
        key, value = torch.randn(2, length, HEADS, DIM)
        write_kv(kv, layer, key, value, slots(table, 0, length))
        expected.append(dense(query[row : row + 1], key, value, window=window, softcap=softcap))

    rows = AttentionRows(
        tokens=torch.arange(len(lengths)).unsqueeze(1),
        positions=torch.tensor(lengths).unsqueeze(1) - 1,
        blocks=torch.tensor(tables),
    )
    out = attend(query, kv, layer, rows, scale=DIM**-0.5, window=window, softcap=softcap)

    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(0, 70),
    count=st.integers(1, 40),
    group_size=st.integers(1, 3),
    window=st.none() | st.integers(1, 50),
    softcap=st.none() | st.just(2.0),
    seed=st.integers(0, 2**31),
)
def test_a_chunk_of_a_prompt_equals_dense_attention(
    start: int, count: int, group_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    end = start + count
    kv, table = new_cache(5), torch.randperm(5).tolist()[: -(-end // BLOCK_SIZE)]
    key, value = torch.randn(2, end, HEADS, DIM)
    write_kv(kv, 0, key, value, slots(table, 0, end))
    query = torch.randn(count + 3, HEADS * group_size, DIM)  # the chunk stands after 3 tokens of others

    rows = AttentionRows(
        tokens=torch.arange(3, 3 + count).unsqueeze(0),
        positions=torch.arange(start, end).unsqueeze(0),
        blocks=torch.tensor([table]),
    )
    out = attend(query, kv, 0, rows, scale=DIM**-0.5, window=window, softcap=softcap)

    torch.testing.assert_close(
        out[0], dense(query[3:], key, value, window=window, softcap=softcap), atol=1e-5, rtol=1e-5
    )


def test_what_is_written_is_gathered_in_the_order_of_positions() -> None:
    kv = new_cache(4)
    key, value = torch.randn(2, 40, HEADS, DIM)
    write_kv(kv, 1, key, value, slots([3, 0], 0, 40))

    found_key, found_value = gather_kv(kv, 1, torch.tensor([[3, 0]]))

    assert torch.equal(found_key[0, :, :40], key.transpose(0, 1))
    assert torch.equal(found_value[0, :, :40], value.transpose(0, 1))
    assert (kv[[1, 2]] == 7).all()
    assert (kv[:, 0] == 7).all()


def test_clearing_blocks_takes_out_what_an_earlier_owner_left_and_nothing_else() -> None:
    kv = new_cache(4).fill_(float("nan"))

    clear_blocks(kv, torch.tensor([2, 0]))

    assert (kv[[0, 2]] == 0).all()
    assert kv[[1, 3]].isnan().all()


def test_bfloat16_keeps_the_type_and_stays_close_to_float32() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 50, HEADS, DIM)
    query = torch.randn(1, 4, DIM)
    rows = AttentionRows(tokens=torch.tensor([[0]]), positions=torch.tensor([[49]]), blocks=torch.tensor([[0, 1]]))
    kv = new_cache(2).bfloat16()
    write_kv(kv, 0, key.bfloat16(), value.bfloat16(), slots([0, 1], 0, 50))

    out = attend(query.bfloat16(), kv, 0, rows, scale=DIM**-0.5)

    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].float(), dense(query, key, value), atol=0.03, rtol=0.03)
