"""BadWords: bans the last token of a word when its other tokens stand at the end of the sequence.

The last of those may be known on the device alone, so all are compared there. Used by the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trio_llm.engine.sampling.edits import ANY_TOKEN, EditedRow, Words
from trio_llm.engine.sampling.transfer import to_device

__all__ = ["BadWords"]

_NO_TOKEN = -2
"""Before the first token of a sequence."""


class BadWords:
    """Words of several tokens, for rows that have some. An `Edit`."""

    def __init__(self, rows: list[tuple[EditedRow, Words]], *, width: int) -> None:
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

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        newest = previous.index_select(0, self._batch_rows).unsqueeze(1)
        self._tails = torch.cat((self._tails[:, 1:], newest), dim=1)
        is_begun = (self._tails.index_select(0, self._owners) == self._words) | (self._words == ANY_TOKEN)
        bans = torch.where(is_begun.all(1), float("-inf"), 0.0)
        scores.view(-1).index_add_(0, self._index, bans)


def _tail(row: EditedRow, count: int) -> list[int]:
    """The `count` tokens before the one before `position`, which the host may not know yet."""
    known = row.sequence.token_ids[max(0, row.position - 1 - count) : row.position - 1]
    return [_NO_TOKEN] * (count - len(known)) + known
