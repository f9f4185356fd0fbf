"""KeptSequences: what the sampler keeps of sequences from one batch to the next.

Only of those whose parameters need it, and only while they run: all of it can be made again.
Used by the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from trio_llm.engine.sampling.edits import Pieces, make_pieces
from trio_llm.engine.sampling.penalties import PenaltyCounts, PenaltyState
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState

__all__ = ["KeptSequences"]


@dataclass(slots=True, eq=False)
class _Kept:
    pieces: Pieces
    penalty: PenaltyState | None = None


class KeptSequences:
    """By sequence, for a model with `width` ids."""

    def __init__(self, eos_token_ids: tuple[int, ...], *, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self.counts = PenaltyCounts(width, device)
        self._eos_token_ids = eos_token_ids
        self._kept: dict[Sequence, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def pieces_of(self, sequence: Sequence) -> Pieces:
        """Of its parameters as they are now: a session's new input may bring others."""
        kept = self._kept.get(sequence)
        if kept is not None:
            pieces = kept.pieces
            if pieces.params is sequence.params and pieces.bad_words is sequence.bad_words:
                return pieces
            self._forget(sequence)
        pieces = make_pieces(sequence, self._eos_token_ids, width=self.width, device=self.device)
        self._kept[sequence] = _Kept(pieces)
        return pieces

    def penalty_state_of(self, sequence: Sequence) -> PenaltyState:
        """`pieces_of` must have been asked before."""
        kept = self._kept[sequence]
        if kept.penalty is not None and kept.penalty.num_prompt_tokens != sequence.num_prompt_tokens:
            self.counts.close_state(kept.penalty)
            kept.penalty = None
        if kept.penalty is None:
            kept.penalty = self.counts.open_state(sequence)
        return kept.penalty

    def forget_others(self, rows: Rows[Sequence]) -> None:
        """Forget the sequences that do not run and are not among these, so that memory does not grow with traffic."""
        resting = [one for one in self._kept if one.state is not SequenceState.RUNNING]
        if resting:
            for sequence in set(resting).difference(rows):
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        kept = self._kept.pop(sequence)
        if kept.penalty is not None:
            self.counts.close_state(kept.penalty)
