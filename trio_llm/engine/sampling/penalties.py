"""Penalties: presence, frequency and repetition, for the rows that use them.

As in OpenAI's API, presence and frequency penalties count what was generated; as in transformers, the repetition
penalty divides (or multiplies, below zero) the scores of all that stands in prompt or answer. Each touches
only tokens that the sequence has, so the cost goes with their number and not with the vocabulary.

Counts live on the device, one row for each sequence that needs some. Each step adds the token that the step
before sampled, which the host need not know yet. What does not fit a sequence any more is counted again from its
tokens. Used by the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trio_llm.engine.sampling.edits import EditedRow
from trio_llm.engine.sampling.transfer import to_device
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

__all__ = ["PENALTY_STEPS", "Penalties", "PenaltyCounts", "PenaltyState", "uses_penalties"]

PENALTY_STEPS = 128
"""A `Penalties` has room for the tokens of so many steps; then the next one is made."""
_MAX_FRESH = PENALTY_STEPS
"""Tokens since a sequence's list was made, beyond which it is made anew, each token once."""
_NO_ROW = 0
_NOT_COUNTED = -1


def uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or _counts(params)


def _counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class PenaltyState:
    """What is kept of one sequence between batches. All of it can be made again from the sequence's tokens."""

    row: int
    """Of the counts; 0 if no penalty needs them."""
    num_prompt_tokens: int
    listed: Tensor  # int64[N], each token once that was in need of a look
    num_listed: int
    """Tokens of the sequence, from its first, that are in the list."""
    num_counted: int
    """Tokens of the sequence whose generated ones are in the counts."""


class PenaltyCounts:
    """How often each token was generated, int32[rows, V]. Grows with the sequences that need a row."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device
        self._free: list[int] = []
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.table = torch.zeros((1, width), dtype=torch.int32, device=device)
        """The first row is nobody's, and stays zero."""

    def open_state(self, sequence: Sequence) -> PenaltyState:
        """A state that nothing was counted for. `close_state` must follow."""
        row = self._take_row() if _counts(sequence.params) else _NO_ROW
        return PenaltyState(row, sequence.num_prompt_tokens, self._nothing, num_listed=0, num_counted=_NOT_COUNTED)

    def close_state(self, state: PenaltyState) -> None:
        """Its row may be given to others."""
        if state.row != _NO_ROW:
            self._free.append(state.row)

    def _take_row(self) -> int:
        if not self._free:
            num_rows = self.table.shape[0]
            self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
            self.table = torch.cat((self.table, torch.zeros_like(self.table)))
        return self._free.pop()

    def recount(self, state: PenaltyState, sequence: Sequence, end: int) -> None:
        """Count the generated tokens before position `end`."""
        if state.row != _NO_ROW:
            counts = self.table[state.row]
            counts.zero_()
            if generated := sequence.token_ids[sequence.num_prompt_tokens : end]:
                index = to_device(generated, self.device, dtype=torch.int64)
                counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        state.num_counted = end


class Penalties:
    """All three, for rows that have any. An `Edit`, for `PENALTY_STEPS` steps at most.

    Entries are pairs of a row and a token; a pair that is there twice does no harm, since both get the same value.
    """

    def __init__(self, rows: list[EditedRow], states: list[PenaltyState], counts: PenaltyCounts) -> None:
        device, width = counts.device, counts.width
        self._counts, self._states, self._num_steps = counts, states, 0
        lists = [_list_tokens(row, state, counts) for row, state in zip(rows, states, strict=True)]
        for row, state in zip(rows, states, strict=True):
            if state.num_counted != row.position - 1:
                counts.recount(state, row.sequence, row.position - 1)

        owners = [i for i, (listed, fresh) in enumerate(lists) for _ in range(len(listed))]
        owners += [i for i, (listed, fresh) in enumerate(lists) for _ in fresh]
        self._num_entries = len(owners)
        owners += list(range(len(rows))) * PENALTY_STEPS
        fresh = to_device([token for _, fresh in lists for token in fresh], device, dtype=torch.int64)
        tokens = torch.cat([*(listed for listed, _ in lists), fresh])
        tokens = torch.cat((tokens, tokens.new_zeros(len(rows) * PENALTY_STEPS)))

        def column(values: list[int]) -> Tensor:
            return to_device(values, device, dtype=torch.int64)

        self._batch_rows = column([row.batch_index for row in rows])
        self._positions = column([row.position for row in rows])
        self._num_prompt_tokens = column([row.sequence.num_prompt_tokens for row in rows])
        self._has_row = column([state.row != _NO_ROW for state in states])
        self._score_base = column([row.index * width for row in rows])
        self._count_base = column([state.row * width for state in states])
        owner = column(owners)
        self._score_index = self._score_base.index_select(0, owner) + tokens
        self._count_index = self._count_base.index_select(0, owner) + tokens
        params = [row.sequence.params for row in rows]
        strengths = torch.stack(
            [
                to_device([one.repetition_penalty for one in params], device, dtype=torch.float32),
                to_device([one.frequency_penalty for one in params], device, dtype=torch.float32),
                to_device([one.presence_penalty for one in params], device, dtype=torch.float32),
            ]
        )
        self._repetition, self._frequency, self._presence = strengths.index_select(1, owner).unbind(0)
        self._repeats = any(one.repetition_penalty != 1 for one in params)
        self._has_counts = any(state.row != _NO_ROW for state in states)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        self._add(previous.index_select(0, self._batch_rows))
        end = self._num_entries
        index = self._score_index[:end]
        flat = scores.view(-1)
        values = flat.index_select(0, index)
        if self._repeats:
            strength = self._repetition[:end]
            values = torch.where(values > 0, values / strength, values * strength)
        if self._has_counts:
            count = self._counts.table.view(-1).index_select(0, self._count_index[:end])
            values = values - self._frequency[:end] * count - self._presence[:end] * (count > 0)
        flat.index_copy_(0, index, values)

    def _add(self, tokens: Tensor) -> None:
        """The tokens of the step before become entries, and are counted where they were generated."""
        count_index = self._count_base + tokens
        if self._has_counts:
            is_counted = ((self._positions > self._num_prompt_tokens) & (self._has_row > 0)).to(torch.int32)
            self._counts.table.view(-1).index_add_(0, count_index, is_counted)
        end = self._num_entries + len(tokens)
        self._score_index[self._num_entries : end] = self._score_base + tokens
        self._count_index[self._num_entries : end] = count_index
        self._positions.add_(1)
        self._num_entries = end
        self._num_steps += 1

    def close(self) -> None:
        """No step comes any more: the states now know of all tokens that were counted."""
        for state in self._states:
            state.num_counted += self._num_steps
        self._num_steps = 0


def _list_tokens(row: EditedRow, state: PenaltyState, counts: PenaltyCounts) -> tuple[Tensor, list[int]]:
    """The tokens whose scores may change, but for the last one: a list on the device, and those since it was made."""
    sequence, end = row.sequence, row.position - 1
    # Without a repetition penalty the prompt does not matter.
    begin = 0 if sequence.params.repetition_penalty != 1 else sequence.num_prompt_tokens
    fresh = sequence.token_ids[max(begin, state.num_listed) : end]
    if len(fresh) > _MAX_FRESH or state.num_listed > end:
        distinct = list(set(sequence.token_ids[begin:end]))
        state.listed, state.num_listed, fresh = to_device(distinct, counts.device, dtype=torch.int64), end, []
    return state.listed, fresh
