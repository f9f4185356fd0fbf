"""Layout: the rows of a batch, sorted by what is to be done with them, and their parameters on the device.

Made when a batch changes, and good for as long as the same rows go on by a token each. Used by the sampler.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

from trio_llm.engine.sampling.bad_words import BadWords
from trio_llm.engine.sampling.edits import Added, AllowedTokens, Bias, Edit, EditedRow, Words
from trio_llm.engine.sampling.filters import MinPFilter, TopFilter
from trio_llm.engine.sampling.kept import KeptSequences
from trio_llm.engine.sampling.keyed_noise import mix_seeds
from trio_llm.engine.sampling.penalties import PENALTY_STEPS, Penalties, uses_penalties
from trio_llm.engine.sampling.transfer import to_device
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

__all__ = ["Layout", "Region"]


_num_prompt_tokens = attrgetter("num_prompt_tokens")


class _Rank(enum.IntEnum):
    """Rows sorted by these have in one piece: what is edited, what is drawn, what goes through the same filter."""

    EDITED_GREEDY = 0
    EDITED_FREE = 1
    EDITED_MIN_P = 2
    EDITED_TOP = 3
    TOP = 4
    MIN_P = 5
    FREE = 6
    GREEDY = 7
    """Nothing is to be done but to take the likeliest token: on a CPU such rows are not even copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Rows `begin` to `end` of the scores, and what decides which of their tokens may be drawn."""

    begin: int
    end: int
    filter: MinPFilter | TopFilter


class Layout:
    """What a step must know of its rows. Scores are the rows in `order`, without the greedy ones at its end.

    Args:
        rows: B sequences.
        positions: of the token to sample next, for each of them.
    """

    def __init__(self, rows: Rows[Sequence], positions: Rows[int], kept: KeptSequences) -> None:
        device, width = kept.device, kept.width
        self.rows = list(rows)
        self.next_positions = list(positions)
        """For the step to come."""
        self._num_prompt_tokens = list(map(_num_prompt_tokens, rows))
        self.steps_left = 2**31
        """After so many steps something changes."""
        ranks = [_rank(row, position, width) for row, position in zip(rows, positions, strict=True)]
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        counts = Counter(ranks)
        # starts[r]: the first row in order of rank r or above.
        starts = [0, *accumulate(counts[rank] for rank in _Rank)]
        self.num_edited = starts[_Rank.TOP]
        self.drawn_from = starts[_Rank.EDITED_FREE]
        """Scores before this row are greedy, the others are drawn from."""
        self.num_scores = starts[_Rank.GREEDY]

        is_in_order = order == list(range(len(order)))
        self.scored: Tensor | None = None  # int64, which row of the batch each row of the scores is; None: all, as is
        self.greedy: Tensor | None = None  # int64, the same for the rows behind the scores
        self.greedy_runs: list[slice] = []
        """The same as rows of the batch that follow each other."""
        self.back: Tensor | None = None  # int64[B], where each row of the batch is in the order; None: as it is
        if not is_in_order or 0 < self.num_scores < len(order):
            self.scored = to_device(order[: self.num_scores], device, dtype=torch.int64)
            self.greedy = to_device(order[self.num_scores :], device, dtype=torch.int64)
            self.greedy_runs = _runs(order[self.num_scores :])
        if not is_in_order:
            self.back = to_device(sorted(range(len(order)), key=order.__getitem__), device, dtype=torch.int64)
        self.is_edited = [rank <= _Rank.EDITED_TOP for rank in ranks]
        self.edits = self._make_edits(order[: self.num_edited], kept) if self.num_edited else []

        drawn = order[self.drawn_from : self.num_scores]
        params = [rows[i].params for i in drawn]
        self.temperature: Tensor | None = None  # float32[D, 1]; None: 1 everywhere
        if any(one.temperature != 1 for one in params):
            self.temperature = to_device([one.temperature for one in params], device, dtype=torch.float32).unsqueeze(1)
        self.positions = to_device([positions[i] for i in drawn], device, dtype=torch.int64)
        self.seeds = mix_seeds(to_device([_seed(one) for one in params], device, dtype=torch.int64))
        self.regions = _make_regions([rows[i].params for i in order], starts, width=width, device=device)

        self.num_top = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        self.has_logprobs = [row.params.logprobs is not None for row in rows]
        self.logprob_rows: Tensor | None = None  # int64; None: all, if there are any
        if self.num_top and not all(self.has_logprobs):
            wanted = [i for i, has in enumerate(self.has_logprobs) if has]
            self.logprob_rows = to_device(wanted, device, dtype=torch.int64)

    def goes_on_with(self, rows: Rows[Sequence], positions: Rows[int]) -> bool:
        """This is the layout for these, too: the same sequences, each a token further."""
        return (
            self.steps_left > 0
            and self.next_positions == positions
            and self.rows == rows
            # Changes with a session's new input, and its parameters with it. Positions may go on as if nothing were,
            # if as many tokens were dropped at the end of the answer as the input has.
            and self._num_prompt_tokens == list(map(_num_prompt_tokens, rows))
        )

    def advance(self) -> None:
        """A step was launched."""
        self.steps_left -= 1
        self.next_positions = [position + 1 for position in self.next_positions]

    def close(self) -> None:
        """No step comes any more."""
        for edit in self.edits:
            if isinstance(edit, Penalties):
                edit.close()

    def _make_edits(self, order: list[int], kept: KeptSequences) -> list[Edit]:
        """In the order that the module `sampler` tells."""
        kept.forget_others(self.rows)
        allowed: list[tuple[EditedRow, Tensor]] = []
        words: list[tuple[EditedRow, Words]] = []
        added: list[tuple[EditedRow, Added]] = []
        penalised: list[EditedRow] = []
        for index, i in enumerate(order):
            sequence, position = self.rows[i], self.next_positions[i]
            pieces = kept.pieces_of(sequence)
            row = EditedRow(sequence, position, index, i)
            if pieces.allowed is not None:
                allowed.append((row, pieces.allowed))
            if pieces.words is not None:
                words.append((row, pieces.words))
            if pieces.bias is not None:
                added.append((row, pieces.bias))
            num_missing = sequence.params.min_tokens - (position - sequence.num_prompt_tokens)
            if num_missing > 0:
                self.steps_left = min(self.steps_left, num_missing)
                added += [(row, pieces.ends)] if pieces.ends is not None else []
            if uses_penalties(sequence.params):
                penalised.append(row)
        edits: list[Edit] = []
        if allowed:
            edits.append(AllowedTokens(allowed, width=kept.width))
        if words:
            edits.append(BadWords(words, width=kept.width))
        if added:
            edits.append(Bias(added, width=kept.width))
        if penalised:
            states = [kept.penalty_state_of(row.sequence) for row in penalised]
            edits.append(Penalties(penalised, states, kept.counts))
            self.steps_left = min(self.steps_left, PENALTY_STEPS)
        return edits


def _runs(rows: list[int]) -> list[slice]:
    """Ascending numbers as few slices."""
    ends = [i for i in range(1, len(rows) + 1) if i == len(rows) or rows[i] != rows[i - 1] + 1]
    return [slice(rows[begin], rows[end - 1] + 1) for begin, end in zip([0, *ends], ends, strict=False)]


def _seed(params: SamplingParams) -> int:
    # The front end draws one where the caller did not.
    assert params.seed is not None
    return params.seed


def _rank(sequence: Sequence, position: int, width: int) -> _Rank:
    params = sequence.params
    is_edited = (
        position - sequence.num_prompt_tokens < params.min_tokens
        or params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or bool(sequence.bad_words)
        or uses_penalties(params)
    )
    if params.temperature == 0:
        return _Rank.EDITED_GREEDY if is_edited else _Rank.GREEDY
    if params.top_p < 1 or 0 < params.top_k < width:
        return _Rank.EDITED_TOP if is_edited else _Rank.TOP
    if params.min_p > 0:
        return _Rank.EDITED_MIN_P if is_edited else _Rank.MIN_P
    return _Rank.EDITED_FREE if is_edited else _Rank.FREE


def _make_regions(params: list[SamplingParams], starts: list[int], *, width: int, device: torch.device) -> list[Region]:
    """
    Args:
        params: of all rows, in order.
        starts: of each rank.
    """
    regions: list[Region] = []
    for rank in (_Rank.EDITED_MIN_P, _Rank.MIN_P):
        begin, end = starts[rank], starts[rank + 1]
        if begin < end:
            regions.append(Region(begin, end, MinPFilter([one.min_p for one in params[begin:end]], device)))
    begin, end = starts[_Rank.EDITED_TOP], starts[_Rank.MIN_P]
    if begin < end:
        some = params[begin:end]
        top = TopFilter(
            [one.top_k for one in some],
            [one.top_p for one in some],
            [one.min_p for one in some],
            width=width,
            device=device,
        )
        regions.append(Region(begin, end, top))
    return regions
