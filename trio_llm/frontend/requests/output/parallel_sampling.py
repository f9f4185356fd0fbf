"""Parallel sampling: one request for n choices becomes n requests to the engine, and their ends become one.

Pure. Used by `RequestRegistry`, which sends the children, by the output processor and by the collector. The engine
computes the prompt for the first child. The others find it in the prefix cache, except for its last, unfilled block.
"""

from __future__ import annotations

import msgspec

from trio_llm.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["Family", "fan_out", "num_scorings", "repeat_choice"]

_INT64 = 2**63


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """What the engine has to compute for a request of `params.n` choices, each with n = 1.

    Sampled choice i has the seed of the request plus i, wrapped to 64 bits: n choices with seed s are what n requests
    with the seeds s, s + 1, ... get. Greedy choices are all equal, so that there is one request for all of them.
    """
    params = request.params
    if params.n == 1:
        return [request]
    if params.is_greedy:
        return [msgspec.structs.replace(request, params=msgspec.structs.replace(params, n=1))]
    assert params.seed is not None, "the input processor chooses one"
    return [
        msgspec.structs.replace(
            request,
            request_id=_child_id(request.request_id, index),
            params=msgspec.structs.replace(
                params,
                n=1,
                seed=_wrap(params.seed + index),
                prompt_logprobs=params.prompt_logprobs if index < num_scorings(params) else None,
            ),
        )
        for index in range(params.n)
    ]


def num_scorings(params: SamplingParams) -> int:
    """How many of the children give the prompt's log-probabilities.

    One would do, since the prompt is the same. But with DELTA, any of the choices may be the first to be read.
    """
    return params.n if params.output_kind is RequestOutputKind.DELTA and not params.is_greedy else 1


def _child_id(parent_id: str, index: int) -> str:
    return f"{index}_{parent_id}"


def _wrap(number: int) -> int:
    return (number + _INT64) % (2 * _INT64) - _INT64


class Family:
    """The children of one request with n > 1, until the last of them has finished.

    Args:
        child_ids: internal ids, by the index of the choice.
        kind: with FINAL_ONLY, choices that have ended wait here for the others.
    """

    __slots__ = (
        "_choices",
        "_has_first_token",
        "_kind",
        "child_ids",
        "num_cached_tokens",
        "prompt_logprobs",
        "unfinished",
    )

    def __init__(self, child_ids: list[str], kind: RequestOutputKind) -> None:
        self.child_ids = child_ids
        self._kind = kind
        self.unfinished = set(range(len(child_ids)))
        """Indices of the choices whose last output has not come."""
        self._choices: list[CompletionOutput] = []
        self._has_first_token = False
        self.num_cached_tokens = 0
        """Prompt tokens that were in the cache when the request came: those of choice 0, the first to be admitted. What
        the others find in addition is what was computed for it."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Set when they are known, if they were asked for; the last output with FINAL_ONLY has them."""

    def finish(self, output: RequestOutput) -> RequestOutput | None:
        """Take the last output of one child, and return what the reader gets for it. None: nothing yet.

        Only the last one of the last child is `finished`.
        """
        (choice,) = output.outputs
        self.unfinished.remove(choice.index)
        output.finished = not self.unfinished
        if self._kind is RequestOutputKind.FINAL_ONLY:
            self._choices.append(choice)
            if self.unfinished:
                return None
            output.outputs = sorted(self._choices, key=lambda choice: choice.index)
            output.prompt_logprobs = self.prompt_logprobs
        return output

    def take_first_token(self) -> bool:
        """True once: for the first token of the first child to have one. Then the prompt counts as computed."""
        is_first = not self._has_first_token
        self._has_first_token = True
        return is_first


def repeat_choice(output: RequestOutput, num_choices: int) -> RequestOutput:
    """The same output with its one choice so many times over. The choices share no list."""
    (choice,) = output.outputs
    choices = [
        CompletionOutput(
            index,
            choice.text,
            list(choice.token_ids),
            None if choice.logprobs is None else list(choice.logprobs),
            choice.finish_reason,
            choice.stop_reason,
            None if choice.weight_versions is None else list(choice.weight_versions),
        )
        for index in range(num_choices)
    ]
    return msgspec.structs.replace(output, outputs=choices)
