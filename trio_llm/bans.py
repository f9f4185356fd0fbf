"""Bans: which tokens the parameters of a request forbid at a place of its answer.

Pure. Used by the front end, which refuses requests without a token that could come, and by the engine, which samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trio_llm.sampling import SamplingParams

__all__ = ["end_tokens", "last_tokens"]


def end_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer, and are banned before `min_tokens`."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)


def last_tokens(bad_words: Iterable[Sequence[int]], tail: Sequence[int]) -> frozenset[int]:
    """The last token of each bad word whose other tokens are the end of `tail`, in tokens: it must not come next.

    Args:
        tail: what comes before, as far back as the longest word reaches.
    """
    return frozenset(
        word[-1] for word in bad_words if len(word) == 1 or list(tail[-(len(word) - 1) :]) == list(word[:-1])
    )
