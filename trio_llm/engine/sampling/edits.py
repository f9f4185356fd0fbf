"""Edits: what changes the scores of those rows that ask for it, before temperature.

Used by the sampler. One is made for a batch that goes on for many steps, and applied at each; it is built from
`Pieces`, which are made once for a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from trio_llm.engine.sampling.bans import end_tokens
from trio_llm.engine.sampling.transfer import to_device
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

__all__ = ["ANY_TOKEN", "Added", "AllowedTokens", "Bias", "Edit", "EditedRow", "Pieces", "Words", "make_pieces"]

ANY_TOKEN: Final = -1
"""In front of a word in `Words`: whatever stands there."""
_NEVER: Final = float("-inf")


Added = tuple[Tensor, Tensor]  # token ids int64[N], and what is added to their scores, float32[N]
Words = tuple[Tensor, Tensor]  # int64[W, M], without their last tokens, padded in front; int64[W], the last tokens


class Edit(Protocol):
    """A change to scores."""

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        """Change the scores in place, for the step after the one before. Nothing waits for the device.

        Args:
            scores: float32[E, V] of the edited rows, contiguous.
            previous: int64[B], the last token of each row of the batch.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a sequence's parameters say about single tokens, on the device. Ids beyond the vocabulary are left out."""

    params: SamplingParams
    bad_words: list[list[int]]
    """Both as they were when this was made; a session's new input may bring others."""
    allowed: Tensor | None  # int64[A]
    bias: Added | None
    """logit_bias, and bad words of one token."""
    ends: Added | None
    """What min_tokens bans."""
    words: Words | None
    """Bad words of several tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class EditedRow:
    """One row of the scores, for the token at `position` of its sequence."""

    sequence: Sequence
    position: int
    index: int
    """In the scores."""
    batch_index: int
    """In the batch, and so in `previous`."""


def make_pieces(sequence: Sequence, eos_token_ids: Iterable[int], *, width: int, device: torch.device) -> Pieces:
    """For a model with `width` ids."""
    params = sequence.params
    allowed = None
    if params.allowed_token_ids is not None:
        ids = [token_id for token_id in params.allowed_token_ids if token_id < width]
        allowed = to_device(ids, device, dtype=torch.int64)
    bias = dict(params.logit_bias)
    bias |= {word[0]: _NEVER for word in sequence.bad_words if len(word) == 1}
    ends = dict.fromkeys(end_tokens(params, eos_token_ids), _NEVER) if params.min_tokens else {}
    words = [word for word in sequence.bad_words if len(word) > 1 and word[-1] < width]
    return Pieces(
        params,
        sequence.bad_words,
        allowed,
        _added(bias, width, device) if bias else None,
        _added(ends, width, device) if ends else None,
        _padded(words, device) if words else None,
    )


def _added(values: dict[int, float], width: int, device: torch.device) -> Added:
    known = {token_id: value for token_id, value in values.items() if token_id < width}
    return (
        to_device(list(known), device, dtype=torch.int64),
        to_device(list(known.values()), device, dtype=torch.float32),
    )


def _padded(words: list[list[int]], device: torch.device) -> Words:
    longest = max(map(len, words))
    return (
        to_device([[ANY_TOKEN] * (longest - len(word)) + word[:-1] for word in words], device, dtype=torch.int64),
        to_device([word[-1] for word in words], device, dtype=torch.int64),
    )


class AllowedTokens:
    """Leaves nothing but `allowed_token_ids`. NaN and infinity elsewhere become NaN, so that the row still fails."""

    def __init__(self, rows: list[tuple[EditedRow, Tensor]], *, width: int) -> None:
        device = rows[0][1].device
        self._rows = to_device([row.index for row, _ in rows], device, dtype=torch.int64)
        self._index = torch.cat([allowed + row.index * width for row, allowed in rows])

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        flat = scores.view(-1)
        kept = flat.index_select(0, self._index)
        scores.index_copy_(0, self._rows, scores.index_select(0, self._rows).add_(_NEVER))
        flat.index_copy_(0, self._index, kept)


class Bias:
    """Adds `logit_bias`, and minus infinity to bad words of one token and, before `min_tokens`, to ends."""

    def __init__(self, rows: list[tuple[EditedRow, Added]], *, width: int) -> None:
        self._index = torch.cat([token_ids + row.index * width for row, (token_ids, _) in rows])
        self._values = torch.cat([values for _, (_, values) in rows])

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        scores.view(-1).index_add_(0, self._index, self._values)
