"""SamplerState: what the sampler keeps of sequences from one batch to the next.

It is kept for running sequences whose parameters need it, and can be made again from their tokens. Used by the logits
processors.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from trio_llm.engine.sampling.logits_processors.penalty_counts import PenaltyCounts, PenaltyState
from trio_llm.engine.sampling.logits_processors.token_constraints import TokenConstraints, make_constraints
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState

__all__ = ["SamplerState"]


@dataclass(slots=True, eq=False)
class _State:
    constraints: TokenConstraints
    penalty: PenaltyState | None = None


class SamplerState:
    """The state of each sequence, for a model with `width` ids."""

    def __init__(self, eos_token_ids: tuple[int, ...], *, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self.counts = PenaltyCounts(width, device)
        self._eos_token_ids = eos_token_ids
        self._states: dict[Sequence, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def constraints_of(self, sequence: Sequence) -> TokenConstraints:
        """The constraints of the sequence's present parameters."""
        return self._state_of(sequence).constraints

    def penalty_state_of(self, sequence: Sequence) -> PenaltyState:
        """The state of the sequence's present prompt: a session's new input makes a new one."""
        state = self._state_of(sequence)
        if state.penalty is not None and state.penalty.num_prompt_tokens != sequence.num_prompt_tokens:
            self.counts.close_state(state.penalty)
            state.penalty = None
        if state.penalty is None:
            state.penalty = self.counts.open_state(sequence)
        return state.penalty

    def forget_others(self, rows: Rows[Sequence]) -> None:
        """Forget the sequences that do not run and are not among these, so that memory does not grow with traffic."""
        resting = [one for one in self._states if one.state is not SequenceState.RUNNING]
        if resting:
            for sequence in set(resting).difference(rows):
                self._forget(sequence)

    def _state_of(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence)
        if state is not None:
            constraints = state.constraints
            if constraints.params is sequence.params and constraints.bad_words is sequence.bad_words:
                return state
            self._forget(sequence)
        constraints = make_constraints(sequence, self._eos_token_ids, width=self.width, device=self.device)
        state = self._states[sequence] = _State(constraints)
        return state

    def _forget(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence)
        if state.penalty is not None:
            self.counts.close_state(state.penalty)
