"""Bans: which tokens a sequence must not get next.

Pure. `banned_tokens` is the rule in plain Python: for the fake executor, and for tests of the logits processors, which
ban the same tokens on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from trio_llm.engine.scheduling.sequence import Sequence as EngineSequence
from trio_llm.sampling import SamplingParams

__all__ = ["NOTHING_LEFT", "banned_tokens", "end_tokens"]

NOTHING_LEFT: Final = (
    "min_tokens, stop_token_ids, allowed_token_ids and bad_words together leave no token that could be sampled"
)
_NOTHING: Final[frozenset[int]] = frozenset()


def end_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """What ends an answer, and is banned before `min_tokens`."""
    return frozenset(params.stop_token_ids) | (_NOTHING if params.ignore_eos else frozenset(eos_token_ids))


def banned_tokens(
    sequence: EngineSequence, eos_token_ids: Iterable[int], *, pending: Sequence[int] = ()
) -> frozenset[int]:
    """Tokens that must not come next: ends of the answer before `min_tokens`, and last tokens of bad words.

    Args:
        pending: tokens behind those of the sequence, sampled and not yet appended.
    """
    banned = _NOTHING
    if sequence.num_output_tokens + len(pending) < sequence.params.min_tokens:
        banned = end_tokens(sequence.params, eos_token_ids)
    if sequence.bad_words:
        longest = max(map(len, sequence.bad_words)) - 1
        banned |= _last_tokens(sequence.bad_words, [*sequence.token_ids[-longest:], *pending] if longest else [])
    return banned


def _last_tokens(bad_words: Sequence[Sequence[int]], tail: list[int]) -> frozenset[int]:
    """The last token of each word whose other tokens stand at the end of the sequence, prompt included."""
    return frozenset(word[-1] for word in bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == list(word[:-1]))
