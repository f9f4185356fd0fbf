"""AllowedTokens: leaves nothing but `allowed_token_ids`. A logits processor."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Self

import torch
from torch import Tensor

from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logits_processors.token_constraints import BANNED
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.transfer import to_device

__all__ = ["AllowedTokens"]


class AllowedTokens(LogitsProcessor):
    """Bans all other tokens. NaN and infinity among their scores become NaN, so that the row still fails.

    Args:
        rows: each with its tokens, int64[A].
    """

    def __init__(self, rows: Rows[tuple[ProcessedRow, Tensor]], *, width: int) -> None:
        device = rows[0][1].device
        self._rows = to_device([row.index for row, _ in rows], device, dtype=torch.int64)
        self._index = torch.cat([allowed + row.index * width for row, allowed in rows])

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        return sequence.params.allowed_token_ids is not None

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        found = [(row, state.constraints_of(row.sequence).allowed) for row in rows]
        return cls([(row, allowed) for row, allowed in found if allowed is not None], width=state.width)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        flat = scores.view(-1)
        allowed = flat.index_select(0, self._index)
        scores.index_copy_(0, self._rows, scores.index_select(0, self._rows).add_(BANNED))
        flat.index_copy_(0, self._index, allowed)
