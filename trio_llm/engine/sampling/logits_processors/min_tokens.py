"""MinTokens: bans what ends an answer until `min_tokens` were generated. A logits processor."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Self

import torch
from torch import Tensor

from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logits_processors.token_constraints import TokenValues
from trio_llm.engine.scheduling.sequence import Sequence

__all__ = ["MinTokens"]


class MinTokens(LogitsProcessor):
    """Is good until the first row has its `min_tokens`.

    Args:
        rows: each with the tokens that end its answer, and the values that ban them.
    """

    def __init__(self, rows: Rows[tuple[ProcessedRow, TokenValues]], *, width: int) -> None:
        self._index = torch.cat([token_ids + row.index * width for row, (token_ids, _) in rows])
        self._values = torch.cat([values for _, (_, values) in rows])
        self.num_steps = min(_num_missing(row.sequence, row.position) for row, _ in rows)

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        return sequence.params.min_tokens > 0 and _num_missing(sequence, position) > 0

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        found = [(row, state.constraints_of(row.sequence).ends) for row in rows]
        return cls([(row, ends) for row, ends in found if ends is not None], width=state.width)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        # Adding keeps NaN, and so the error of its row.
        scores.view(-1).index_add_(0, self._index, self._values)


def _num_missing(sequence: Sequence, position: int) -> int:
    return sequence.params.min_tokens - (position - sequence.num_prompt_tokens)
