"""Attention over the paged KV cache: the protocol that models call, and its reference implementation in torch.

Shapes: T tokens of the step, Hq query heads, H key-value heads, G = Hq / H, D head size, C context tokens.
Faster implementations are measured against `TorchAttention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trio_llm.engine.ops.batch import DeviceBatch, RowsOnHost
from trio_llm.engine.ops.kv_layout import BLOCK_SIZE

__all__ = ["Attention", "TorchAttention"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Attention(Protocol):
    """Causal attention of one step. Begun once per step, then called by every layer of the model."""

    def begin(self, batch: DeviceBatch, kv: Tensor) -> None:
        """Take up a batch and the cache. Reads nothing back from the device.

        Args:
            kv: [blocks, layers, 2, H, BLOCK_SIZE, D].
        """
        ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put K and V of all T tokens into the cache, [T, H, D] each.

        A layer does this before any `attend`: the rows of a step may share blocks.
        """
        ...

    def attend(self, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """Attention of all tokens over their cached context, themselves included.

        Args:
            query: [T, Hq, D].
            window: how many tokens a query sees, itself included; None: all.
            softcap: scores become softcap * tanh(score / softcap).
        Returns:
            [T, Hq, D]; finite numbers without meaning for the tokens of rows that pad.
        """
        ...


class TorchAttention:
    """The reference: gathers the context of the rows and runs torch's attention on it.

    Rows whose tables are about as long attend together. A softmax is accumulated in float32. Blocks whose first slot a
    step writes are cleared before: masked positions weigh 0, but 0 times a NaN that an earlier owner left would be NaN.
    """

    def __init__(self) -> None:
        self._kv: Tensor = torch.empty(0)
        self._slots: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        """Block and offset in it, int64[T] each."""
        self._groups: list[_RowGroup] = []
        self._covers_all = True
        """Every token is in a group: no row pads."""

    def begin(self, batch: DeviceBatch, kv: Tensor) -> None:
        slots = batch.slots.to(torch.int64)  # as an index, int32 would be converted in every layer
        self._kv, self._slots = kv, (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        host = batch.host
        if (fresh := host.slots[host.slots % BLOCK_SIZE == 0] // BLOCK_SIZE).size:
            kv.index_fill_(0, _to_device(fresh.astype(np.int64), kv.device), 0)
        self._groups = [
            *_decode_groups(host, kv),
            *(_prefill_group(host, row, kv) for row in range(host.num_decode, len(host.context))),
        ]
        self._covers_all = int(host.context.min()) > 0

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        blocks, offsets = self._slots
        self._kv[:, layer][blocks, :, :, offsets] = torch.stack((key, value), dim=1).to(self._kv.dtype)

    def attend(self, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if self._covers_all and len(self._groups) == 1:
            # Contiguous, as below: some architectures take a view of it.
            return self._attend_group(self._groups[0], layer, query, **how).contiguous()
        out = query.new_empty(query.shape) if self._covers_all else query.new_zeros(query.shape)
        for group in self._groups:
            out[group.tokens] = self._attend_group(group, layer, query[group.tokens], **how)
        return out

    def _attend_group(
        self, group: _RowGroup, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """[R * N, Hq, D] in and out.

        Query heads that share a key-value head go as more queries of that head: K and V are not repeated in memory.
        """
        key, value = group.gather(self._kv, layer)
        num_rows, num_queries = group.positions.shape
        num_heads, head_dim = key.shape[1], key.shape[3]
        group_size = query.shape[1] // num_heads
        packed = (
            query.view(num_rows, num_queries, num_heads, group_size, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(num_rows, num_heads, group_size * num_queries, head_dim)
        )
        bias = group.bias(window, group_size=group_size, dtype=query.dtype)
        if softcap is None:
            out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
        else:
            scores = torch.matmul(packed.float(), key.float().transpose(-1, -2)) * scale
            scores = torch.tanh(scores / softcap) * softcap
            out = torch.matmul(torch.softmax(scores + bias, dim=-1), value.float()).to(query.dtype)
        return (
            out.view(num_rows, num_heads, group_size, num_queries, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_rows * num_queries, num_heads * group_size, head_dim)
        )


@dataclass(slots=True, eq=False)
class _RowGroup:
    """R rows that attend together: each has N queries. Decode rows of several sequences (N = 1), or one chunk (R = 1).

    A *span* is what a block holds of one head of one layer: BLOCK_SIZE x D numbers in one piece. Gathering spans gives
    K and V head by head in the order of positions with one copy.
    """

    tokens: slice | Tensor
    """The tokens of all rows, in order: R * N indices among the step's tokens."""
    positions: Tensor  # int64[R, N]: position of each query in its sequence
    num_blocks: int
    """M: blocks in the longest table of the rows. Shorter ones repeat a block of their own."""
    spans: Tensor  # int64[2 * R * H * M]: those of K, then those of V, in layer 0
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    """By sliding window; made at first use and shared by the layers."""

    def gather(self, kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the rows, [R, H, M * BLOCK_SIZE, D] each."""
        num_heads, head_dim = kv.shape[3], kv.shape[5]
        spans = kv.view(-1, BLOCK_SIZE * head_dim)
        gathered = spans.index_select(0, self.spans + layer * 2 * num_heads)
        shape = (2, self.positions.shape[0], num_heads, self.num_blocks * BLOCK_SIZE, head_dim)
        key, value = gathered.view(shape)
        return key, value

    def bias(self, window: int | None, *, group_size: int, dtype: torch.dtype) -> Tensor:
        """What is added to scores: 0 where a query may look, minus infinity elsewhere.

        Returns:
            [R, 1, G * N, C], or [R, 1, 1, C] if N is 1.
        """
        if (found := self.biases.get(window)) is None:
            keys = torch.arange(self.num_blocks * BLOCK_SIZE, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)  # [R, N, 1]
            is_hidden = keys > queries
            if window is not None:
                is_hidden |= keys <= queries - window
            found = torch.zeros(is_hidden.shape, dtype=dtype, device=keys.device).masked_fill_(is_hidden, -torch.inf)
            if self.positions.shape[1] > 1:
                found = found.repeat(1, group_size, 1)
            found = self.biases[window] = found.unsqueeze(1)
        return found


def _decode_groups(host: RowsOnHost, kv: Tensor) -> Iterator[_RowGroup]:
    """Rows with one token, in groups of like length: within one, padding at most doubles what is read."""
    begins = host.block_start[: host.num_decode]
    num_blocks = host.block_start[1 : host.num_decode + 1] - begins
    lengths = np.frexp(num_blocks - 1)[1]  # in bits
    lengths[num_blocks == 0] = -1  # rows that pad
    for length in sorted(set(lengths.tolist()) - {-1}):
        rows = np.flatnonzero(lengths == length)
        of_rows = num_blocks[rows][:, None]
        columns = np.arange(of_rows.max())
        # Padded with a block of its own, so that a row never reads what belongs to another.
        tables = host.blocks[begins[rows][:, None] + np.where(columns < of_rows, columns, 0)]
        first, last = int(rows[0]), int(rows[-1])
        yield _RowGroup(
            tokens=slice(first, last + 1) if last - first + 1 == len(rows) else _to_device(rows, kv.device),
            positions=_to_device(host.context[rows].astype(np.int64)[:, None] - 1, kv.device),
            num_blocks=len(columns),
            spans=_spans(tables, kv),
        )


def _prefill_group(host: RowsOnHost, row: int, kv: Tensor) -> _RowGroup:
    begin, end = (int(token) for token in host.query_start[row : row + 2])
    context = int(host.context[row])
    table = host.blocks[host.block_start[row] : host.block_start[row + 1]]
    return _RowGroup(
        tokens=slice(begin, end),
        positions=torch.arange(context - (end - begin), context, device=kv.device).unsqueeze(0),
        num_blocks=len(table),
        spans=_spans(table[None], kv),
    )


def _spans(tables: I32, kv: Tensor) -> Tensor:
    """The spans of K and V of rows with these tables, [R, M], in the order that `_RowGroup.gather` needs."""
    num_layers, num_heads = kv.shape[1], kv.shape[3]
    spans_per_block = num_layers * 2 * num_heads
    first = tables.astype(np.int64)[None, :, None] * spans_per_block  # [1, R, 1, M]
    return _to_device((first + np.arange(2 * num_heads).reshape(2, 1, num_heads, 1)).ravel(), kv.device)


def _to_device(values: I64, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory it would wait for the device
