"""make_sequence: a sequence for tests of the engine, with as little said as a test needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

__all__ = ["make_sequence"]


def make_sequence(
    request_id: str,
    prompt: Iterable[int],
    params: SamplingParams | None = None,
    *,
    max_tokens: int = 8,
    generated: Iterable[int] = (),
    cache_salt: str | None = None,
    **fields: Any,
) -> Sequence:
    """A sequence as the engine core makes it.

    Args:
        params: None: greedy, with up to `max_tokens` tokens.
        generated: tokens of the answer that are there already.
        fields: more fields of `Sequence`.
    """
    prompt = list(prompt)
    return Sequence(
        request_id=request_id,
        token_ids=[*prompt, *generated],
        num_prompt_tokens=len(prompt),
        params=params or SamplingParams(temperature=0, seed=0, max_tokens=max_tokens),
        cache_root=salted(cache_salt=cache_salt),
        **fields,
    )
