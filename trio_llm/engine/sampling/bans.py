"""Bans: which tokens a sequence must not get next.

Pure. Used by the sampler and the fake executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from trio_llm.engine.scheduling.sequence import Sequence as EngineSequence

__all__ = ["NOTHING_LEFT", "banned_tokens"]

NOTHING_LEFT: Final = (
    "min_tokens, stop_token_ids, allowed_token_ids and bad_words together leave no token that could be sampled"
)
_NOTHING: Final[frozenset[int]] = frozenset()


def banned_tokens(sequence: EngineSequence, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that must not come next: ends of the answer before `min_tokens`, and last tokens of bad words."""
    params = sequence.params
    banned = _NOTHING
    if sequence.num_output_tokens < params.min_tokens:
        banned = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            banned |= frozenset(eos_token_ids)
    if sequence.bad_words:
        banned |= _last_tokens(sequence.bad_words, sequence.token_ids)
    return banned


def _last_tokens(bad_words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> frozenset[int]:
    """The last token of each word whose other tokens stand at the end of the sequence, prompt included."""
    longest = max(map(len, bad_words)) - 1
    tail = list(token_ids[-longest:]) if longest else []
    return frozenset(word[-1] for word in bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == list(word[:-1]))
