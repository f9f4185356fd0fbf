"""check_row: a row of the engine has the form that its request must get.

Pure. Used by the output processor for rows that are not merely tokens amid an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.wire.messages import EngineCoreOutput, LogprobRow

__all__ = ["check_row"]

_MAX_LOGPROB: Final = 1e-4
"""A log-probability is at most 0; this is what a device may round."""


def check_row(state: RequestState, row: EngineCoreOutput) -> None:
    """Return if the row, which is no error, may be read. Rows for `process_delta` do not come here: see there.

    Raises:
        EngineGenerateError: the row cannot be true, or it answers something else than was asked for.
    """
    num_tokens = len(row.new_token_ids)
    if row.start < 0:
        raise EngineGenerateError(f"the engine gave a row that starts at {row.start}")
    if row.prompt_logprobs is not None:
        _check_prompt_logprobs(state, row, len(row.prompt_logprobs))
    elif state.wants_logprobs and len(row.logprobs or ()) != num_tokens:
        raise EngineGenerateError(
            f"the engine gave log-probabilities for {len(row.logprobs or ())} of {num_tokens} tokens"
        )
    elif state.wants_logprobs:
        _check_logprobs(row.logprobs or (), row.new_token_ids, state.request.params.logprobs)
    if num_tokens and state.request.pooling_params is not None:
        raise EngineGenerateError(f"the engine gave {num_tokens} tokens to a request for a vector")
    if row.pooled is not None and state.request.pooling_params is None:
        raise EngineGenerateError("the engine gave a vector to a request for text")
    _check_counts(state, row)
    if row.goes_on and (row.finish_reason is None or not state.request.resumable):
        raise EngineGenerateError("the engine ended one answer of a request that is no session, or ended it unfinished")
    if state.status is RequestStatus.IDLE and (num_tokens or row.goes_on):
        raise EngineGenerateError(f"the engine gave {num_tokens} tokens to a session that waits for its next input")


def _check_counts(state: RequestState, row: EngineCoreOutput) -> None:
    num_sent = state.num_prompt_tokens + row.start  # after a restart, what was generated is part of the prompt
    if not 0 <= row.num_cached_tokens <= num_sent:
        raise EngineGenerateError(f"the engine found {row.num_cached_tokens} cached tokens of a prompt of {num_sent}")
    limit = state.request.params.max_tokens
    num_tokens = len(state.token_ids) + row.start + len(row.new_token_ids) - state.num_tokens
    if limit is not None and num_tokens > limit:
        raise EngineGenerateError(f"the engine gave {num_tokens} tokens and max_tokens is {limit}")


def _check_logprobs(rows: Sequence[LogprobRow], token_ids: Sequence[int], num_top: int | None) -> None:
    """
    Args:
        token_ids: the tokens that the rows are of.
        num_top: alternatives that were asked for.
    """
    for row, token_id in zip(rows, token_ids, strict=True):
        ids, logprobs = row.token_ids, row.logprobs
        if not ids or len(ids) != len(logprobs):
            raise EngineGenerateError(f"the engine gave {len(logprobs)} log-probabilities for {len(ids)} token ids")
        if ids[0] != token_id:
            raise EngineGenerateError(f"the engine gave log-probabilities of token {ids[0]} for token {token_id}")
        if len(ids) > 1 + (num_top or 0):
            raise EngineGenerateError(
                f"the engine gave {len(ids) - 1} alternatives to token {token_id}, and {num_top} were asked for"
            )
        if math.isnan(sum(logprobs)) or max(logprobs) > _MAX_LOGPROB:
            wrong = next(one for one in logprobs if math.isnan(one) or one > _MAX_LOGPROB)
            raise EngineGenerateError(f"the engine gave {wrong:g} as a log-probability at token {token_id}")
        if row.sampled_rank < 1:
            raise EngineGenerateError(f"the engine gave the rank {row.sampled_rank} to token {token_id}")


def _check_prompt_logprobs(state: RequestState, row: EngineCoreOutput, count: int) -> None:
    first, num_prompt_tokens = row.prompt_logprobs_start, state.num_prompt_tokens
    if row.new_token_ids or row.finish_reason is not None:
        raise EngineGenerateError("the engine gave log-probabilities of the prompt together with tokens or an end")
    if not 0 <= first <= first + count <= num_prompt_tokens:
        raise EngineGenerateError(
            f"the engine gave log-probabilities for the prompt tokens {first} to {first + count}, but the prompt has "
            f"{num_prompt_tokens}"
        )
    if known := state.request.prompt_token_ids[first : first + count]:
        skipped = 1 if first == 0 else 0  # nothing comes before the first token, so its row says nothing
        _check_logprobs((row.prompt_logprobs or [])[skipped:], known[skipped:], state.request.params.prompt_logprobs)
