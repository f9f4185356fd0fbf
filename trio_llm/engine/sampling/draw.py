"""Draw: temperature, filters and noise for the rows of a batch whose tokens are drawn. Used by the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trio_llm.engine.sampling.argmax import likeliest
from trio_llm.engine.sampling.filters import Filter
from trio_llm.engine.sampling.gumbel import mix_seeds, negated_gumbel_noise, row_keys
from trio_llm.engine.transfer import to_device
from trio_llm.sampling import SamplingParams

__all__ = ["Draw", "FilteredRows"]

_BLOCK_TOKENS = 4 * 49_152
"""Scores for each thread of a CPU at once: noise takes many passes, which are quicker in its cache."""


@dataclass(frozen=True, slots=True, eq=False)
class FilteredRows:
    """Some of the rows to draw, and what decides which of their tokens may be drawn."""

    rows: slice
    filter: Filter


class Draw:
    """
    Args:
        params: of D rows.
        positions: of the token to sample next, for each of them.
        filtered: rows among these, in the order in which filters go.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        filtered: Sequence[FilteredRows],
        device: torch.device,
    ) -> None:
        self.filtered = filtered
        self._temperature: Tensor | None = None  # float32[D, 1]; None: 1 everywhere
        if any(one.temperature != 1 for one in params):
            self._temperature = to_device([one.temperature for one in params], device, dtype=torch.float32).unsqueeze(1)
        self._positions = to_device(positions, device, dtype=torch.int64)
        self._seeds = mix_seeds(to_device([_seed(one) for one in params], device, dtype=torch.int64))

    def choose(self, scores: Tensor, hashes: Tensor, *, may_change: bool) -> tuple[Tensor, Tensor]:
        """Draw a token of each row for the next step.

        Args:
            scores: float32[D, V].
            hashes: int32[1, V], of `token_hashes`.
            may_change: the scores may be changed. They are if there are filters.

        Returns:
            The score that decided, with its noise, float32[D], and the token, int64[D].
        """
        if self._temperature is not None:
            scores = scores.div_(self._temperature) if may_change else scores / self._temperature
        for some in self.filtered:
            part = scores[some.rows]
            part.masked_fill_(part < some.filter.threshold(part), float("-inf"))
        keys = row_keys(self._seeds, self._positions)
        self._positions.add_(1)
        num_rows = max(1, torch.get_num_threads() * _BLOCK_TOKENS // scores.shape[1])
        if scores.is_cuda or len(keys) <= num_rows:
            return likeliest(scores - negated_gumbel_noise(keys, hashes))
        blocks = [
            likeliest(block - negated_gumbel_noise(keys_of_block, hashes))
            for block, keys_of_block in zip(scores.split(num_rows), keys.split(num_rows), strict=True)
        ]
        best, token_ids = (torch.cat(column) for column in zip(*blocks, strict=True))
        return best, token_ids


def _seed(params: SamplingParams) -> int:
    # The front end draws one where the caller did not.
    assert params.seed is not None
    return params.seed
