"""Refuses a request whose own parameters leave no token that could come first in its answer.

Pure. Used by the input processor. What leaves no token only later, after tokens that the model chose, is found by the
engine, which ends that request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trio_llm.bans import end_tokens, last_tokens
from trio_llm.errors import InvalidRequestError
from trio_llm.sampling import SamplingParams

__all__ = ["check_tokens_left"]


def check_tokens_left(
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
    prompt_token_ids: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    width: int,
) -> None:
    """`logit_bias` bans nothing: its values are finite.

    Args:
        bad_words: the words in tokens.
        width: the model's ids are those below it.

    Raises:
        InvalidRequestError: every token that is allowed is banned, at least before the first token of the answer. The
            message names all parameters that have a part in it, `param` the first of them.
    """
    allowed = params.allowed_token_ids
    num_bans = len(bad_words) + (len(params.stop_token_ids) + len(eos_token_ids) if params.min_tokens else 0)
    if (width if allowed is None else 1) > num_bans:
        return
    candidates = frozenset(range(width) if allowed is None else allowed)
    longest = max(map(len, bad_words), default=1)
    words = last_tokens(bad_words, prompt_token_ids[-longest:])
    ends = end_tokens(params, eos_token_ids) if params.min_tokens else frozenset[int]()
    if not candidates <= words | ends:
        return
    own_ends = ends.difference(params.stop_token_ids)
    has_part = {
        "allowed_token_ids": allowed is not None,
        "min_tokens": not candidates <= words,
        "stop_token_ids": not candidates <= words | own_ends,
        "bad_words": not candidates <= ends,
    }
    names = [name for name, has in has_part.items() if has]
    reason = f": before {params.min_tokens} tokens, nothing may end the answer" if has_part["min_tokens"] else ""
    raise InvalidRequestError(
        f"{' and '.join(names)} together leave no token that could be sampled{reason}; allow other tokens, or "
        "leave out one of them",
        names[0],
    )
