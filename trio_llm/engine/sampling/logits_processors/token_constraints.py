"""TokenConstraints: what a sequence's parameters say about single tokens, as tensors on the device.

Made once per sequence and parameters. Used by the logits processors, by way of `SamplerState`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trio_llm.bans import end_tokens
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.transfer import to_device
from trio_llm.sampling import SamplingParams

__all__ = ["ANY_TOKEN", "BANNED", "TokenConstraints", "TokenValues", "Words", "make_constraints"]

ANY_TOKEN: Final = -1
"""Padding in front of a word in `Words`. It matches any token."""
BANNED: Final = float("-inf")
"""Added to the score of a token that must not come."""


TokenValues = tuple[Tensor, Tensor]  # token ids int64[N], and what is added to their scores, float32[N]
Words = tuple[Tensor, Tensor]  # int64[W, M], without their last tokens, padded in front; int64[W], the last tokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenConstraints:
    """Each is None if its parameter is not used. Ids beyond the vocabulary are left out, so each may be empty."""

    params: SamplingParams
    bad_words: list[list[int]]
    """Both as they were when this was made; a session's new input may bring others."""
    allowed: Tensor | None  # int64[A]
    bias: TokenValues | None
    """logit_bias, and bad words of one token."""
    ends: TokenValues | None
    """The ban of all tokens that end the answer, before min_tokens."""
    words: Words | None
    """Bad words of several tokens."""


def make_constraints(
    sequence: Sequence, eos_token_ids: Iterable[int], *, width: int, device: torch.device
) -> TokenConstraints:
    """The constraints of a sequence, for a model with `width` ids."""
    params = sequence.params
    allowed = None
    if params.allowed_token_ids is not None:
        ids = [token_id for token_id in params.allowed_token_ids if token_id < width]
        allowed = to_device(ids, device, dtype=torch.int64)
    bias = dict(params.logit_bias)
    bias |= {word[0]: BANNED for word in sequence.bad_words if len(word) == 1}
    ends = None
    if params.min_tokens:
        ends = _token_values(dict.fromkeys(end_tokens(params, eos_token_ids), BANNED), width, device)
    words = [word for word in sequence.bad_words if len(word) > 1]
    return TokenConstraints(
        params,
        sequence.bad_words,
        allowed,
        _token_values(bias, width, device) if bias else None,
        ends,
        _padded([word for word in words if word[-1] < width], device) if words else None,
    )


def _token_values(values: dict[int, float], width: int, device: torch.device) -> TokenValues:
    known = {token_id: value for token_id, value in values.items() if token_id < width}
    return (
        to_device(list(known), device, dtype=torch.int64),
        to_device(list(known.values()), device, dtype=torch.float32),
    )


def _padded(words: list[list[int]], device: torch.device) -> Words:
    longest = max(map(len, words), default=2)
    begins = [[ANY_TOKEN] * (longest - len(word)) + word[:-1] for word in words]
    return (
        to_device(begins, device, dtype=torch.int64).reshape(len(words), longest - 1),
        to_device([word[-1] for word in words], device, dtype=torch.int64),
    )
