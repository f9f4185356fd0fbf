"""Batch: a step plan as tensors.

Built anew for each step from the sequences' tokens and block tables; nothing is kept between steps.
Used by the torch executor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trio_llm.engine.models.paged_attention import AttentionBatch
from trio_llm.engine.ops.attention import BLOCK_SIZE, AttentionRows
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan

__all__ = ["Batch", "build_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of T tokens; the head of the model runs over B of them."""

    token_ids: Tensor  # int64[T]
    positions: Tensor  # int64[T]
    logits_rows: Tensor  # int64[B]
    attention: AttentionBatch
    pending: tuple[tuple[int, Sequence], ...]
    """Indices of `token_ids` that are 0 for now: the token that the step before samples for that sequence belongs
    there."""


def build_batch(plan: StepPlan, device: torch.device) -> Batch:
    """Lay the plan's chunks one after the other, in the plan's order."""
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    fresh: list[int] = []
    logits_rows: list[int] = []
    pending: list[tuple[int, Sequence]] = []
    decode: dict[int, list[tuple[int, ScheduledChunk]]] = {}
    prefill: list[tuple[int, ScheduledChunk]] = []

    for chunk in plan.chunks:
        table = chunk.sequence.block_ids
        first, end = len(token_ids), chunk.start + chunk.count
        token_ids += chunk.sequence.token_ids[chunk.start : end]
        if chunk.follows_pending:
            pending.append((len(token_ids), chunk.sequence))
            token_ids.append(0)
        positions += range(chunk.start, end)
        blocks += (table[position // BLOCK_SIZE] for position in range(chunk.start, end))
        fresh += table[-(-chunk.start // BLOCK_SIZE) : -(-end // BLOCK_SIZE)]
        if chunk.needs_logits:
            logits_rows.append(first + chunk.count - 1)
        if chunk.count == 1:
            # Rows of like length attend together: padding at most doubles what is read.
            decode.setdefault((-(-end // BLOCK_SIZE) - 1).bit_length(), []).append((first, chunk))
        else:
            prefill.append((first, chunk))

    position_tensor = torch.tensor(positions, dtype=torch.int64)
    attention = AttentionBatch(
        slot_blocks=_tensor(blocks, device),
        slot_offsets=(position_tensor % BLOCK_SIZE).to(device),
        fresh_blocks=_tensor(fresh, device),
        rows=tuple(
            [_decode_rows(group, device) for group in decode.values()]
            + [_prefill_rows(first, chunk, device) for first, chunk in prefill]
        ),
    )
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=position_tensor.to(device),
        logits_rows=_tensor(logits_rows, device),
        attention=attention,
        pending=tuple(pending),
    )


def _decode_rows(group: list[tuple[int, ScheduledChunk]], device: torch.device) -> AttentionRows:
    tables = [chunk.sequence.block_ids[: chunk.start // BLOCK_SIZE + 1] for _, chunk in group]
    longest = max(map(len, tables))
    # Padded with a block of its own, so that a row never reads what belongs to another.
    padded = [table + table[:1] * (longest - len(table)) for table in tables]
    return AttentionRows(
        tokens=_tensor([first for first, _ in group], device).unsqueeze(1),
        positions=_tensor([chunk.start for _, chunk in group], device).unsqueeze(1),
        blocks=torch.tensor(padded, dtype=torch.int64, device=device),
    )


def _prefill_rows(first: int, chunk: ScheduledChunk, device: torch.device) -> AttentionRows:
    end = chunk.start + chunk.count
    return AttentionRows(
        tokens=torch.arange(first, first + chunk.count, device=device).unsqueeze(0),
        positions=torch.arange(chunk.start, end, device=device).unsqueeze(0),
        blocks=_tensor(chunk.sequence.block_ids[: -(-end // BLOCK_SIZE)], device).unsqueeze(0),
    )


def _tensor(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
