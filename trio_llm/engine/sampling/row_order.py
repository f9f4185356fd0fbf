"""RowOrder: the rows of a batch, sorted so that each step of sampling works on few slices of them.

Pure but for the tensors of `RowIndex`. Used by the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trio_llm.engine.transfer import to_device

__all__ = ["Flags", "RowIndex", "RowOrder"]

Flags = Sequence[bool]  # one per row of the batch
_Traits = tuple[bool, ...]  # of one row: is_processed, is_drawn, and is_filtered of each filter


class RowOrder:
    """Rows to process stand first, rows to draw behind and among them, and last those of which only the likeliest token
    is taken.

    Args:
        is_processed: whether a logits processor changes the scores, for each row of the batch.
        is_drawn: whether the token is drawn; else it is the likeliest one.
        is_filtered: one list for each filter: whether it is for the row. None is for a row that is not drawn.
    """

    def __init__(self, is_processed: Flags, is_drawn: Flags, is_filtered: Sequence[Flags]) -> None:
        groups: dict[_Traits, list[int]] = {}
        for row, traits in enumerate(zip(is_processed, is_drawn, *is_filtered, strict=True)):
            groups.setdefault(traits, []).append(row)
        self._groups = [(traits, groups[traits]) for traits in sorted(groups, key=_sort_key)]
        self.rows = [row for _, rows in self._groups for row in rows]
        """The rows of the batch in this order; those with the same traits as in the batch."""
        self.num_processed = sum(is_processed)
        self.num_drawn = sum(is_drawn)
        """So many rows with scores, the last ones, are drawn."""
        self.num_scores = sum(len(rows) for traits, rows in self._groups if any(traits))
        """So many rows, the first ones, are processed or drawn. On a CPU the others are not even copied."""

    def slices_of(self, number: int) -> list[slice]:
        """The rows that one of the filters is for, as places in this order."""
        slices: list[slice] = []
        begin = 0
        for (_, _, *is_filtered), rows in self._groups:
            end = begin + len(rows)
            if is_filtered[number]:
                if slices and slices[-1].stop == begin:
                    begin = slices.pop().start
                slices.append(slice(begin, end))
            begin = end
        return slices


def _sort_key(traits: _Traits) -> tuple[bool, ...]:
    """Rows to process ascend by the tuple, the others descend.

    So the rows to process are one slice, as are those to draw and those of the last filter.
    """
    is_processed, is_drawn, *is_filtered = traits
    flags = (is_drawn, *reversed(is_filtered))
    return (False, *flags) if is_processed else (True, *(not flag for flag in flags))


class RowIndex:
    """A `RowOrder` as indices on the device."""

    def __init__(self, order: RowOrder, device: torch.device) -> None:
        self.scores: Tensor | None = None  # int64[S], the row of the batch that each row of the scores is; None: all
        self.greedy: Tensor | None = None  # int64, the same for the rows behind the scores
        self.greedy_runs: list[slice] = []
        """The same as slices of the batch."""
        self.back: Tensor | None = None  # int64[B], where each row of the batch is in the order; None: as it is
        rows, num_scores = order.rows, order.num_scores
        is_identity = rows == list(range(len(rows)))
        if not is_identity or 0 < num_scores < len(rows):
            self.scores = to_device(rows[:num_scores], device, dtype=torch.int64)
            self.greedy = to_device(rows[num_scores:], device, dtype=torch.int64)
            self.greedy_runs = _runs(rows[num_scores:])
        if not is_identity:
            self.back = to_device(sorted(range(len(rows)), key=rows.__getitem__), device, dtype=torch.int64)


def _runs(numbers: Sequence[int]) -> list[slice]:
    """Ascending numbers as few slices."""
    ends = [i for i in range(1, len(numbers) + 1) if i == len(numbers) or numbers[i] != numbers[i - 1] + 1]
    return [slice(numbers[begin], numbers[end - 1] + 1) for begin, end in zip([0, *ends], ends, strict=False)]
