"""make_token_logprobs: the engine's rows of ids and numbers get the text and the bytes of their tokens.

Pure. Used by the output processor, once per token of requests that asked for them.
"""

from __future__ import annotations

from typing import Final, Protocol

from trio_llm.errors import EngineGenerateError
from trio_llm.outputs import Logprob, TokenLogprobs
from trio_llm.wire.messages import LogprobRow

__all__ = ["LOGPROB_FLOOR", "TokenNames", "make_token_logprobs"]

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames(Protocol):
    """What single tokens stand for. `TokenTable` is one."""

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for ids that the tokenizer does not know.

        Raises:
            TokenIdError: the model cannot emit this id.
        """
        ...


def make_token_logprobs(row: LogprobRow, names: TokenNames) -> TokenLogprobs:
    """The sampled token and its alternatives. The sampled one may be among the alternatives too.

    Raises:
        EngineGenerateError: the row has no sampled token, or not one number for each id, or an id that the model
            cannot emit.
    """
    if not row.token_ids or len(row.token_ids) != len(row.logprobs):
        raise EngineGenerateError(
            f"the engine gave {len(row.logprobs)} log-probabilities for {len(row.token_ids)} token ids"
        )
    sampled, *top = zip(row.token_ids, row.logprobs, strict=True)
    return TokenLogprobs(
        sampled=_name(*sampled, row.sampled_rank, names),
        top=tuple([_name(token_id, value, rank, names) for rank, (token_id, value) in enumerate(top, start=1)]),
    )


def _name(token_id: int, value: float, rank: int, names: TokenNames) -> Logprob:
    data = names.token_bytes(token_id)
    # The comparison is false for NaN too. A rounding error above 0 would be a probability above 1.
    clamped = min(value, 0.0) if value > LOGPROB_FLOOR else LOGPROB_FLOOR
    return Logprob(token_id, clamped, rank, data.decode("utf-8", "replace"), data)
