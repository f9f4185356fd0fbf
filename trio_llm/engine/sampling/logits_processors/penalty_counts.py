"""PenaltyCounts: how often each sequence has generated each token, on the device. Used by `Penalties`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.transfer import to_device
from trio_llm.sampling import SamplingParams

__all__ = ["PenaltyCounts", "PenaltyState", "needs_counts"]

_SHARED_ROW = 0
_NOT_COUNTED = -1


def needs_counts(params: SamplingParams) -> bool:
    """Whether a penalty depends on how often a token was generated."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class PenaltyState:
    """What is kept of one sequence between batches. All of it can be made again from the sequence's tokens."""

    row: int
    """The row of the counts: its own if `has_counts`, else one that all share and none changes."""
    num_prompt_tokens: int
    listed: Tensor  # int64[N], each token once whose score a penalty may change
    num_listed: int
    """Tokens of the sequence, from its first, that are in the list."""
    num_counted: int
    """Tokens of the sequence whose generated ones are in the counts."""

    @property
    def has_counts(self) -> bool:
        return self.row != _SHARED_ROW


class PenaltyCounts:
    """How often each token was generated, int32[rows, V]. Grows with the sequences that need a row."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self._free: list[int] = []
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.table = torch.zeros((1, width), dtype=torch.int32, device=device)
        """The first row belongs to no sequence, and stays zero."""

    def open_state(self, sequence: Sequence) -> PenaltyState:
        """A state that nothing was counted for. `close_state` must follow."""
        row = self._take_row() if needs_counts(sequence.params) else _SHARED_ROW
        return PenaltyState(row, sequence.num_prompt_tokens, self._nothing, num_listed=0, num_counted=_NOT_COUNTED)

    def close_state(self, state: PenaltyState) -> None:
        """Its row may be given to others."""
        if state.has_counts:
            self._free.append(state.row)

    def _take_row(self) -> int:
        if not self._free:
            num_rows = self.table.shape[0]
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
            self.table = torch.cat((self.table, torch.zeros_like(self.table)))
        return self._free.pop()

    def recount(self, state: PenaltyState, sequence: Sequence, end: int) -> None:
        """Count the generated tokens before position `end`."""
        if state.has_counts:
            counts = self.table[state.row]
            counts.zero_()
            if generated := sequence.token_ids[sequence.num_prompt_tokens : end]:
                index = to_device(generated, self.device, dtype=torch.int64)
                counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        state.num_counted = end
