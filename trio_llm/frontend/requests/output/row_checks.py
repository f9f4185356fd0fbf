"""check_row: a row of the engine has the form that its request must get.

Pure. Used by the output processor for rows that are not merely tokens amid an answer.
"""

from __future__ import annotations

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["check_row"]


def check_row(state: RequestState, row: EngineCoreOutput) -> None:
    """Return if the row, which is no error, may be read.

    Raises:
        EngineGenerateError: lengths in it do not fit each other, or it answers something else than was asked for.
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
    if num_tokens and state.request.pooling_params is not None:
        raise EngineGenerateError(f"the engine gave {num_tokens} tokens to a request for a vector")
    if row.goes_on and (row.finish_reason is None or not state.request.resumable):
        raise EngineGenerateError("the engine ended one answer of a request that is no session, or ended it unfinished")
    if state.status is RequestStatus.IDLE and (num_tokens or row.goes_on):
        raise EngineGenerateError(f"the engine gave {num_tokens} tokens to a session that waits for its next input")


def _check_prompt_logprobs(state: RequestState, row: EngineCoreOutput, count: int) -> None:
    first, num_prompt_tokens = row.prompt_logprobs_start, state.num_prompt_tokens
    if row.new_token_ids or row.finish_reason is not None:
        raise EngineGenerateError("the engine gave log-probabilities of the prompt together with tokens or an end")
    if not 0 <= first <= first + count <= num_prompt_tokens:
        raise EngineGenerateError(
            f"the engine gave log-probabilities for the prompt tokens {first} to {first + count}, but the prompt has "
            f"{num_prompt_tokens}"
        )
