"""TokenBias: adds `logit_bias`, and bans bad words of one token. A logits processor."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Self

import torch
from torch import Tensor

from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logits_processors.token_constraints import TokenValues
from trio_llm.engine.scheduling.sequence import Sequence

__all__ = ["TokenBias"]


class TokenBias(LogitsProcessor):
    """Adds a value to the scores of some tokens; minus infinity bans a token.

    Args:
        rows: each with its tokens and their values.
    """

    def __init__(self, rows: Rows[tuple[ProcessedRow, TokenValues]], *, width: int) -> None:
        self._index = torch.cat([token_ids + row.index * width for row, (token_ids, _) in rows])
        self._values = torch.cat([values for _, (_, values) in rows])

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        if sequence.params.logit_bias:
            return True
        return bool(sequence.bad_words) and any(len(word) == 1 for word in sequence.bad_words)

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        found = [(row, state.constraints_of(row.sequence).bias) for row in rows]
        return cls([(row, bias) for row, bias in found if bias is not None], width=state.width)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        scores.view(-1).index_add_(0, self._index, self._values)
