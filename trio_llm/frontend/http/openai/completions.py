"""CompletionRequest: the body of POST /v1/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import WithJsonSchema

from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.frontend.http.openai.fields import (
    NOT_SUPPORTED,
    CommonFields,
    Neutral,
    only,
    parse_request,
    sampling_params,
)
from trio_llm.frontend.text.quoting import quote
from trio_llm.sampling import SamplingParams

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "MAX_PROMPTS",
    "CompletionRequest",
    "check_num_choices",
    "completion_params",
    "completion_prompts",
    "is_prompt_only",
    "parse_completion_request",
]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Of all prompts together."""
_INT32 = 2**31

_COMPLETION_NOT_SUPPORTED: Mapping[str, Neutral] = {**NOT_SUPPORTED, "suffix": only("")}

_PROMPT_SCHEMA: Any = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


class CompletionRequest(CommonFields):
    """Text to continue: one prompt or several."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """The request in a JSON object.

    Raises:
        InvalidRequestError: `param` names the field at fault.
    """
    return parse_request(CompletionRequest, body, _COMPLETION_NOT_SUPPORTED)


def completion_params(request: CompletionRequest, defaults: Mapping[str, float], *, room: int) -> SamplingParams:
    """
    Args:
        room: tokens that the context has left for the answer. A request that names no limit gets what is there; one
            that wants more than that is refused where it is admitted.
    Raises:
        InvalidRequestError: a value is out of range.
    """
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room))
    elif is_prompt_only(request):
        max_tokens = 1  # the engine cannot do with less; it is not shown
    params = sampling_params(request, max_tokens=max_tokens, logprobs=request.logprobs, defaults=defaults)
    if request.echo and params.logprobs is not None:
        return msgspec.structs.replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    return params


def is_prompt_only(request: CompletionRequest) -> bool:
    """Nothing is to be generated: the prompt comes back, with its log-probabilities if they are asked for."""
    return bool(request.echo) and request.max_tokens == 0


def completion_prompts(prompt: Any, *, max_model_len: int) -> list[str | list[int]]:
    """The prompts of a request: from a string, token ids, a list of strings, or a list of lists of token ids.

    Raises:
        PromptTooLongError: a list has so many ids that the model cannot take them, whatever they are.
        InvalidRequestError: something else, or an empty prompt.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"{len(prompt)} prompts are over the limit of {MAX_PROMPTS}", "prompt")
        kind = type(prompt[0])
        if any(type(one) is not kind for one in prompt):
            raise InvalidRequestError("prompt must not mix strings and lists of token ids", "prompt")
        return [_one_prompt(one, max_model_len) for one in prompt]
    return [_one_prompt(prompt, max_model_len)]


def check_num_choices(num_prompts: int, n: int) -> None:
    """
    Raises:
        InvalidRequestError: `n` choices for each of the prompts are too many.
    """
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts of {n} choices each are over the limit of {MAX_CHOICES} choices", "n"
        )


def _one_prompt(prompt: Any, max_model_len: int) -> str | list[int]:
    if not isinstance(prompt, str | list):
        raise InvalidRequestError(
            f"prompt must be a string, a list of token ids, or a list of such, not {quote(prompt)}", "prompt"
        )
    if not prompt:
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if isinstance(prompt, list):
        if len(prompt) >= max_model_len:
            raise PromptTooLongError(limit=max_model_len, num_prompt_tokens=len(prompt), max_tokens=None)
        # In C, since there may be very many; the one at fault is looked for only if there is one.
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= _INT32:
            wrong = next(one for one in prompt if type(one) is not int or not 0 <= one < _INT32)
            raise InvalidRequestError(f"prompt: {quote(wrong)} is not a token id", "prompt")
    return prompt
