"""BadWords: bans the last token of a word when its other tokens stand at the end of the sequence. A logits processor.

The newest token of the sequence may be known on the device alone, so all are compared there. Words of one token are
`TokenBias`'s.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.logits_processors.token_constraints import ANY_TOKEN, BANNED, Words
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.transfer import to_device

__all__ = ["BadWords"]

_NO_TOKEN = -2
"""Before the first token of a sequence."""


class BadWords(LogitsProcessor):
    """Bans words of several tokens.

    Args:
        rows: each with its words.
    """

    def __init__(self, rows: Rows[tuple[ProcessedRow, Words]], *, width: int) -> None:
        device = rows[0][1][0].device
        longest = max(words.shape[1] for _, (words, _) in rows)
        owners = [i for i, (_, (words, _)) in enumerate(rows) for _ in range(len(words))]
        self._words = torch.cat(
            [pad(words, (longest - words.shape[1], 0), value=ANY_TOKEN) for _, (words, _) in rows]
        )  # [W, M]
        self._owners = to_device(owners, device, dtype=torch.int64)  # [W]
        self._index = torch.cat([last + row.index * width for row, (_, last) in rows])  # [W], in flat scores
        self._batch_rows = to_device([row.batch_index for row, _ in rows], device, dtype=torch.int64)  # [R]
        self._tails = to_device([_tail(row, longest) for row, _ in rows], device, dtype=torch.int64)  # [R, M]

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        return bool(sequence.bad_words) and any(len(word) > 1 for word in sequence.bad_words)

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        found = [(row, state.constraints_of(row.sequence).words) for row in rows]
        return cls([(row, words) for row, words in found if words is not None], width=state.width)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        newest = previous.index_select(0, self._batch_rows).unsqueeze(1)
        self._tails = torch.cat((self._tails[:, 1:], newest), dim=1)
        is_begun = (self._tails.index_select(0, self._owners) == self._words) | (self._words == ANY_TOKEN)
        bans = torch.where(is_begun.all(1), BANNED, 0.0)
        scores.view(-1).index_add_(0, self._index, bans)


def _tail(row: ProcessedRow, count: int) -> list[int]:
    """The `count` tokens before the one before `position`, which the host may not know yet."""
    known = row.sequence.token_ids[max(0, row.position - 1 - count) : row.position - 1]
    return [_NO_TOKEN] * (count - len(known)) + known
