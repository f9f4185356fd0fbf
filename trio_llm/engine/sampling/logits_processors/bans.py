"""Banned tokens: which tokens a sequence must not get next.

Pure. `banned_tokens` is the rule in plain Python: for the fake executor, and for tests of the logits processors, which
ban the same tokens on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from trio_llm.bans import end_tokens, last_tokens
from trio_llm.engine.scheduling.sequence import Sequence as EngineSequence

__all__ = ["NOTHING_LEFT", "banned_tokens"]

NOTHING_LEFT: Final = (
    "min_tokens, stop_token_ids, allowed_token_ids and bad_words together leave no token that could be sampled"
)
_NOTHING: Final[frozenset[int]] = frozenset()


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
        banned |= last_tokens(sequence.bad_words, [*sequence.token_ids[-longest:], *pending] if longest else [])
    return banned
