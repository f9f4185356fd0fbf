"""measure_work: how much an engine still has to do for one request, as one number.

Pure. Front ends balance engines by it, and engines report in it, so that both mean the same.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ANSWER_TOKEN_WORK", "EXPECTED_ANSWER_TOKENS", "measure_work"]

ANSWER_TOKEN_WORK: Final = 8
"""Prompt tokens that one token of an answer counts as. A step computes at most `max_num_batched_tokens` prompt tokens,
but one token for each of `max_num_seqs` answers, and takes about as long: the ratio of their defaults, 512 to 64."""
EXPECTED_ANSWER_TOKENS: Final = 512
"""An answer counts as no longer than this. `max_tokens` is the whole context for most requests, but they end long
before that: counted in full, one of them would outweigh hundreds of others."""


def measure_work(num_prompt_tokens: int, num_answer_tokens: int) -> int:
    """The work for one request, in prompt tokens.

    Args:
        num_prompt_tokens: those that are not computed yet.
        num_answer_tokens: those that the answer may still get.
    """
    return num_prompt_tokens + ANSWER_TOKEN_WORK * min(num_answer_tokens, EXPECTED_ANSWER_TOKENS)
