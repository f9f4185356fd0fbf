"""read_delta: the text and log-probabilities of the tokens that a row adds to an answer.

Pure. Used by the output processor.
"""

from __future__ import annotations

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.text.detokenizer import TokenTable
from trio_llm.frontend.text.logprobs import make_token_logprobs
from trio_llm.frontend.text.stop import StopScanner
from trio_llm.outputs import CompletionOutput
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["read_delta"]


def read_delta(state: RequestState, row: EngineCoreOutput, table: TokenTable) -> CompletionOutput:
    """What the row adds to the answer. Its tokens that the request has already are left out.

    Args:
        row: passed `check_row`.

    Raises:
        EngineGenerateError: the engine gave not all log-probabilities of the prompt before this row, or ids that the
            model cannot emit.
    """
    num_known = state.num_tokens - row.start
    token_ids = row.new_token_ids[num_known:] if num_known else row.new_token_ids
    if state.scanner is not None:
        delta = _scan(state, state.scanner, token_ids, row)
    else:
        text = state.detokenizer.feed(_visible(state, token_ids, row) if row.finish_reason else token_ids)
        if row.finish_reason is not None:
            text += state.detokenizer.finish()
        delta = CompletionOutput(state.index, text, token_ids, None, row.finish_reason, row.stop_reason)
    state.num_tokens += len(delta.token_ids)
    state.token_ids.extend(delta.token_ids)
    known_scores = state.prompt_logprobs
    if known_scores is not None and delta.token_ids and len(known_scores) != state.num_prompt_tokens:
        raise EngineGenerateError(
            f"the engine gave log-probabilities for {len(known_scores)} of {state.num_prompt_tokens} prompt tokens"
        )
    if state.wants_logprobs:
        rows = (row.logprobs or [])[num_known : num_known + len(delta.token_ids)]
        delta.logprobs = [make_token_logprobs(one, table) for one in rows]
    return delta


def _scan(state: RequestState, scanner: StopScanner, token_ids: list[int], row: EngineCoreOutput) -> CompletionOutput:
    """Token by token, so that several in one row end where they would have ended one at a time."""
    visible = _visible(state, token_ids, row)
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        new = state.detokenizer.feed([token_id]) if count <= len(visible) else ""
        if state.num_tokens + count < state.request.params.min_tokens:
            text += scanner.pass_through(new)  # too early to end, by contract
            continue
        text += scanner.feed(new)
        if scanner.found is not None:
            return CompletionOutput(state.index, text, token_ids[:count], None, "stop", scanner.found)
    if row.finish_reason is not None:
        text += scanner.feed(state.detokenizer.finish())
        if scanner.found is not None:
            return CompletionOutput(state.index, text, token_ids, None, "stop", scanner.found)
        text += scanner.finish()
    return CompletionOutput(state.index, text, token_ids, None, row.finish_reason, row.stop_reason)


def _visible(state: RequestState, token_ids: list[int], row: EngineCoreOutput) -> list[int]:
    """The ids that become text: not the token that ended the answer, unless the request asks for it."""
    if row.finish_reason == "stop" and not state.request.params.include_stop_str_in_output:
        return token_ids[:-1]
    return token_ids
