"""HostBatch: a step plan as numbers. `lay_out` makes it.

Pure, with numpy and without torch. Used by the torch executor; `StepBuffers` uploads the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trio_llm.engine.ops.kv_layout import BLOCK_SIZE
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan

__all__ = ["HostBatch", "lay_out"]

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostBatch:
    """T tokens in R rows, one row per chunk: first those with one token (decode rows and padding), then the others.

    The arrays are parts of `flat`, in the order given here. `blocks` is the last: the lengths of all others follow
    from T, R and B, which are the same for all batches in a bucket of CUDA graphs.
    """

    num_decode: int
    """Rows with one token, those that pad included. They are the first ones."""
    max_query: int
    """Tokens of the row that has most."""
    first_tokens: tuple[int, ...]
    """The index of each chunk's first token, in the plan's order."""
    token_ids: I32  # [T]; 0 where `token_source` is set
    token_source: I32  # [T]: index among the ids that the step before sampled; -1: `token_ids` has the token
    positions: I32  # [T]
    slots: I32  # [T]: block * BLOCK_SIZE + offset
    query_start: I32  # [R + 1]
    context: I32  # [R]: tokens up to the row's last one; 0: a row that pads and writes into the trash block
    block_start: I32  # [R + 1]
    logits_rows: I32  # [B]: in the plan's order; token 0 again where padded
    blocks: I32  # [sum of tables]
    flat: I32


def lay_out(plan: StepPlan, sampled_rows: Mapping[Sequence, int], *, pad_rows_to: int, trash_block: int) -> HostBatch:
    """Lay out the chunks of a plan, those with one token first, and otherwise in the plan's order.

    Args:
        sampled_rows: where the step before puts the token that it samples for a sequence.
        pad_rows_to: R and B are at least this. Rows that pad come after the decode rows and compute one token each.
        trash_block: the block that rows which pad write into.
    """
    num_padding = max(0, pad_rows_to - len(plan.chunks))
    decode = [(index, chunk) for index, chunk in enumerate(plan.chunks) if chunk.count == 1]
    others = [(index, chunk) for index, chunk in enumerate(plan.chunks) if chunk.count != 1]
    rows = _Rows(sampled_rows)
    first_tokens = [0] * len(plan.chunks)
    for index, chunk in decode:
        first_tokens[index] = len(rows.token_ids)
        rows.add(chunk)
    rows.add_padding(num_padding, trash_block)
    for index, chunk in others:
        first_tokens[index] = len(rows.token_ids)
        rows.add(chunk)
    logits_rows = [
        first + chunk.count - 1 for first, chunk in zip(first_tokens, plan.chunks, strict=True) if chunk.needs_logits
    ]
    logits_rows += [0] * (pad_rows_to - len(logits_rows))
    fields = {
        "token_ids": rows.token_ids,
        "token_source": rows.token_source,
        "positions": rows.positions,
        "slots": rows.slots,
        "query_start": rows.query_start,
        "context": rows.context,
        "block_start": rows.block_start,
        "logits_rows": logits_rows,
        "blocks": rows.blocks,
    }
    flat, arrays = _join(fields)
    return HostBatch(
        num_decode=len(decode) + num_padding,
        max_query=max((chunk.count for _, chunk in others), default=1),
        first_tokens=tuple(first_tokens),
        flat=flat,
        **arrays,
    )


class _Rows:
    """Rows in the making."""

    def __init__(self, sampled_rows: Mapping[Sequence, int]) -> None:
        self._sampled_rows = sampled_rows
        self.token_ids: list[int] = []
        self.token_source: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.query_start: list[int] = [0]
        self.context: list[int] = []
        self.block_start: list[int] = [0]
        self.blocks: list[int] = []

    def add(self, chunk: ScheduledChunk) -> None:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        table = sequence.block_ids
        self.token_ids += sequence.token_ids[start:end]
        self.token_source += [-1] * chunk.count
        if chunk.follows_pending:
            self.token_ids.append(0)
            self.token_source[-1] = self._sampled_rows[sequence]
        self.positions += range(start, end)
        if chunk.count == 1:
            self.slots.append(table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE)
        else:
            self.slots += (table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end))
        self.blocks += table[: -(-end // BLOCK_SIZE)]
        self._end_row(context=end)

    def add_padding(self, num_rows: int, trash_block: int) -> None:
        for row in range(num_rows):
            self.token_ids.append(0)
            self.token_source.append(-1)
            self.positions.append(0)
            self.slots.append(trash_block * BLOCK_SIZE + row % BLOCK_SIZE)
            self._end_row(context=0)

    def _end_row(self, *, context: int) -> None:
        self.query_start.append(len(self.token_ids))
        self.context.append(context)
        self.block_start.append(len(self.blocks))


def _join(fields: Mapping[str, list[int]]) -> tuple[I32, dict[str, I32]]:
    """One array that holds all fields, and each field as a part of it."""
    numbers = array("i")
    for values in fields.values():
        numbers.fromlist(values)
    flat = np.frombuffer(numbers, dtype=np.int32)
    parts: dict[str, I32] = {}
    begin = 0
    for name, values in fields.items():
        parts[name] = flat[begin : begin + len(values)]
        begin += len(values)
    return flat, parts
