"""Attention over the paged KV cache: the torch reference operations.

Shapes: T tokens of the step, Hq query heads, H key-value heads, G = Hq / H, D head size, C context tokens.
Used by the attention function of `models/paged_attention.py`. Faster kernels are measured against these.

A *span* is what one block holds of one head: BLOCK_SIZE x D numbers in one piece. Gathering spans gives
K and V head by head in the order of positions with a single copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK_SIZE", "AttentionRows", "attend", "clear_blocks", "gather_kv", "write_kv"]

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache."""


@dataclass(slots=True, eq=False)
class AttentionRows:
    """R rows of a step that attend together: each one has the same number of queries, N.

    Either the decode rows of several sequences (N = 1), or one chunk of a prompt (R = 1).
    """

    tokens: Tensor  # int64[R, N]: index of each query among the step's tokens
    positions: Tensor  # int64[R, N]: position of each query in its sequence
    blocks: Tensor  # int64[R, M]: block table; what is over repeats a block of the same row
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By sliding window; made at first use and shared by the layers."""

    def mask(self, window: int | None, *, group_size: int) -> Tensor:
        """bool[R, 1, G * N, C], true where a query may look: at most its own position, and within the window."""
        found = self.masks.get(window)
        if found is None:
            keys = torch.arange(self.blocks.shape[1] * BLOCK_SIZE, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)  # [R, N, 1]
            found = keys <= queries
            if window is not None:
                found = found & (keys > queries - window)
            found = found.repeat(1, group_size, 1).unsqueeze(1)
            self.masks[window] = found
        return found


def write_kv(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: tuple[Tensor, Tensor]) -> None:
    """Put K and V of the step's tokens into the cache.

    Args:
        kv: [blocks, layers, 2, H, BLOCK_SIZE, D].
        key, value: [T, H, D].
        slots: block and offset in it, int64[T] each; no slot twice.
    """
    blocks, offsets = slots
    kv[:, layer][blocks, :, :, offsets] = torch.stack((key, value), dim=1).to(kv.dtype)


def clear_blocks(kv: Tensor, blocks: Tensor) -> None:
    """Overwrite blocks with zeros, in all layers.

    A block is cleared when its first slot is about to be written: masked positions weigh 0, but 0 times a
    NaN that an earlier owner left there would still be NaN.
    """
    kv.index_fill_(0, blocks, 0)


def gather_kv(kv: Tensor, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of R sequences in the order of positions.

    Args:
        kv: [blocks, layers, 2, H, BLOCK_SIZE, D], contiguous.
        blocks: int64[R, M].
    Returns:
        two tensors [R, H, M * BLOCK_SIZE, D].
    """
    _, num_layers, _, num_heads, block_size, head_dim = kv.shape
    spans = kv.view(-1, block_size * head_dim)
    heads = torch.arange(num_heads, device=kv.device)
    index = ((blocks * num_layers + layer) * (2 * num_heads)).unsqueeze(1) + heads[:, None]  # [R, H, M]
    shape = (blocks.shape[0], num_heads, blocks.shape[1] * block_size, head_dim)
    key = spans.index_select(0, index.flatten()).view(shape)
    value = spans.index_select(0, (index + num_heads).flatten()).view(shape)
    return key, value


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    rows: AttentionRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of some rows of the step over their cached context, themselves included.

    The softmax is accumulated in float32. Query heads that share a key-value head go as more queries of
    that head, so that K and V are not repeated in memory.

    Args:
        query: [T, Hq, D], all queries of the step.
        window: how many tokens a query sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap).
    Returns:
        [R, N, Hq, D].
    """
    key, value = gather_kv(kv, layer, rows.blocks)
    num_rows, num_queries = rows.tokens.shape
    num_heads, head_dim = key.shape[1], key.shape[3]
    group_size = query.shape[1] // num_heads
    packed = (
        query[rows.tokens]  # [R, N, Hq, D]
        .view(num_rows, num_queries, num_heads, group_size, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_rows, num_heads, group_size * num_queries, head_dim)
    )
    mask = rows.mask(window, group_size=group_size)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(packed.float(), key.float().transpose(-1, -2)) * scale
        scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        out = torch.matmul(weights, value.float()).to(query.dtype)
    return (
        out.view(num_rows, num_heads, group_size, num_queries, head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(num_rows, num_queries, num_heads * group_size, head_dim)
    )
