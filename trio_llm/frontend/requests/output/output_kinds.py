"""make_output: what a reader gets for a delta, by the output kind that it asked for.

Pure. Used by the output processor.
"""

from __future__ import annotations

from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.outputs import CompletionOutput, RequestOutput
from trio_llm.sampling import RequestOutputKind

__all__ = ["make_output"]


def make_output(state: RequestState, delta: CompletionOutput) -> RequestOutput | None:
    """What the reader gets, by its output kind. None: nothing yet."""
    is_last = delta.finish_reason is not None
    if state.kind is not RequestOutputKind.DELTA:
        delta = _accumulate(state, delta)
        if state.kind is RequestOutputKind.FINAL_ONLY and not is_last:
            return None
    elif not delta.token_ids and not delta.text and not is_last:
        return None
    if is_last:
        delta.weight_versions = state.weight_versions()
    num_cached_tokens = state.num_cached_tokens if state.family is None else state.family.num_cached_tokens
    output = RequestOutput(
        state.external_id,
        state.num_prompt_tokens,
        num_cached_tokens,
        [delta],
        is_last,
        None,
        state.weight_version,
    )
    if state.prompt_logprobs is not None:
        _add_prompt_logprobs(state, output)
    elif state.family is not None and state.kind is RequestOutputKind.CUMULATIVE:
        output.prompt_logprobs = state.family.prompt_logprobs
    return state.family.finish(output) if is_last and state.family is not None else output


def _add_prompt_logprobs(state: RequestState, output: RequestOutput) -> None:
    """Unless the answer ends, by an abort, before its prompt is through."""
    assert state.prompt_logprobs is not None
    if len(state.prompt_logprobs) < state.num_prompt_tokens:
        return
    output.prompt_logprobs = state.prompt_logprobs
    if state.kind is RequestOutputKind.DELTA:
        state.prompt_logprobs = None
    elif state.family is not None:
        state.family.prompt_logprobs = state.prompt_logprobs


def _accumulate(state: RequestState, delta: CompletionOutput) -> CompletionOutput:
    """All so far, for kinds that give it."""
    state.text.append(delta.text)
    state.logprobs.extend(delta.logprobs or ())
    if state.kind is RequestOutputKind.FINAL_ONLY and delta.finish_reason is None:
        return delta
    logprobs = list(state.logprobs) if state.wants_logprobs else None
    return CompletionOutput(
        state.index, "".join(state.text), list(state.token_ids), logprobs, delta.finish_reason, delta.stop_reason
    )
