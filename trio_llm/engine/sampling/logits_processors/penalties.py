"""Penalties: presence, frequency and repetition. A logits processor.

As in OpenAI's API, presence and frequency penalties count what was generated; as in transformers, the repetition
penalty divides (or multiplies, below zero) the scores of all tokens of prompt and answer. Each touches only tokens that
the sequence has, so the cost goes with their number and not with the vocabulary.

Counts live on the device, one row for each sequence that needs some. Each step adds the token that the step
before sampled, which the host need not know yet. Counts that do not fit their sequence any more are made again from its
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.penalty_counts import PenaltyCounts, PenaltyState, needs_counts
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.transfer import to_device

__all__ = ["PENALTY_STEPS", "Penalties"]

PENALTY_STEPS = 128
"""A `Penalties` has room for the tokens of this many steps."""
_MAX_FRESH = PENALTY_STEPS
"""Tokens since a sequence's list was made, beyond which it is made anew, each token once."""


class Penalties(LogitsProcessor):
    """All three penalties, for rows that have any."""

    num_steps = PENALTY_STEPS

    def __init__(self, rows: Rows[ProcessedRow], states: Rows[PenaltyState], counts: PenaltyCounts) -> None:
        self._counts, self._states, self._num_launched = counts, states, 0
        lists = [_list_tokens(row, state, counts) for row, state in zip(rows, states, strict=True)]
        for row, state in zip(rows, states, strict=True):
            if state.num_counted != row.position - 1:
                counts.recount(state, row.sequence, row.position - 1)
        self._rows = _make_columns(rows, states, counts)
        self._entries = _make_entries(rows, lists, self._rows, counts)
        self._has_repetition = any(row.sequence.params.repetition_penalty != 1 for row in rows)
        self._has_counts = any(state.has_counts for state in states)

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        params = sequence.params
        return params.repetition_penalty != 1 or needs_counts(params)

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        return cls(rows, [state.penalty_state_of(row.sequence) for row in rows], state.counts)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        self._add(previous.index_select(0, self._rows.batch_index))
        entries, end = self._entries, self._entries.count
        index = entries.score_index[:end]
        flat = scores.view(-1)
        values = flat.index_select(0, index)
        if self._has_repetition:
            strength = entries.repetition[:end]
            values = torch.where(values > 0, values / strength, values * strength)
        if self._has_counts:
            count = self._counts.table.view(-1).index_select(0, entries.count_index[:end])
            values = values - entries.frequency[:end] * count - entries.presence[:end] * (count > 0)
        flat.index_copy_(0, index, values)

    def close(self) -> None:
        """No further step comes: the states get the number of tokens that were counted."""
        for state in self._states:
            state.num_counted += self._num_launched
        self._num_launched = 0

    def _add(self, tokens: Tensor) -> None:
        """Make entries of the tokens of the step before, and count those that were generated."""
        rows = self._rows
        count_index = rows.count_base + tokens
        if self._has_counts:
            is_counted = ((rows.position > rows.num_prompt_tokens) & (rows.has_counts > 0)).to(torch.int32)
            self._counts.table.view(-1).index_add_(0, count_index, is_counted)
        self._entries.append(rows.score_base + tokens, count_index)
        rows.position.add_(1)
        self._num_launched += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """One number per row, each int64[R]."""

    batch_index: Tensor
    position: Tensor
    """Where the token to sample will stand; counted up in place."""
    num_prompt_tokens: Tensor
    has_counts: Tensor
    score_base: Tensor
    """Where the row begins in the flat scores."""
    count_base: Tensor
    """Where its counts begin in their flat table."""


@dataclass(slots=True, eq=False)
class _Entries:
    """Pairs of a row and a token whose score a penalty may change, with room for those of steps to come: E pairs.

    A pair that is there twice does no harm, since both get the same value.
    """

    count: int
    """Entries in use."""
    score_index: Tensor  # int64[E], in flat scores
    count_index: Tensor  # int64[E], in the flat table of counts
    repetition: Tensor  # float32[E], as the next two
    frequency: Tensor
    presence: Tensor

    def append(self, score_index: Tensor, count_index: Tensor) -> None:
        end = self.count + len(score_index)
        self.score_index[self.count : end] = score_index
        self.count_index[self.count : end] = count_index
        self.count = end


def _make_columns(rows: Rows[ProcessedRow], states: Rows[PenaltyState], counts: PenaltyCounts) -> _Columns:
    def column(values: list[int]) -> Tensor:
        return to_device(values, counts.device, dtype=torch.int64)

    return _Columns(
        column([row.batch_index for row in rows]),
        column([row.position for row in rows]),
        column([row.sequence.num_prompt_tokens for row in rows]),
        column([state.has_counts for state in states]),
        column([row.index * counts.width for row in rows]),
        column([state.row * counts.width for state in states]),
    )


def _make_entries(
    rows: Rows[ProcessedRow], lists: list[tuple[Tensor, list[int]]], columns: _Columns, counts: PenaltyCounts
) -> _Entries:
    """
    Args:
        lists: of each row, as `_list_tokens` gives them.
    """
    device = counts.device
    owners = [i for i, (listed, fresh) in enumerate(lists) for _ in range(len(listed))]
    owners += [i for i, (listed, fresh) in enumerate(lists) for _ in fresh]
    count = len(owners)
    owners += list(range(len(rows))) * PENALTY_STEPS
    fresh = to_device([token for _, fresh in lists for token in fresh], device, dtype=torch.int64)
    tokens = torch.cat([*(listed for listed, _ in lists), fresh])
    tokens = torch.cat((tokens, tokens.new_zeros(len(rows) * PENALTY_STEPS)))
    owner = to_device(owners, device, dtype=torch.int64)
    params = [row.sequence.params for row in rows]
    strengths = torch.stack(
        [
            to_device([one.repetition_penalty for one in params], device, dtype=torch.float32),
            to_device([one.frequency_penalty for one in params], device, dtype=torch.float32),
            to_device([one.presence_penalty for one in params], device, dtype=torch.float32),
        ]
    )
    repetition, frequency, presence = strengths.index_select(1, owner).unbind(0)
    return _Entries(
        count,
        columns.score_base.index_select(0, owner) + tokens,
        columns.count_base.index_select(0, owner) + tokens,
        repetition,
        frequency,
        presence,
    )


def _list_tokens(row: ProcessedRow, state: PenaltyState, counts: PenaltyCounts) -> tuple[Tensor, list[int]]:
    """The tokens whose scores may change, but for the last one: a list on the device, and those since it was made."""
    sequence, end = row.sequence, row.position - 1
    # Without a repetition penalty the prompt does not matter.
    begin = 0 if sequence.params.repetition_penalty != 1 else sequence.num_prompt_tokens
    fresh = sequence.token_ids[max(begin, state.num_listed) : end]
    if len(fresh) > _MAX_FRESH or state.num_listed > end:
        distinct = list(set(sequence.token_ids[begin:end]))
        state.listed, state.num_listed, fresh = to_device(distinct, counts.device, dtype=torch.int64), end, []
    return state.listed, fresh
