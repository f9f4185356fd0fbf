"""CompletionRequest: the body of POST /v1/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.fields import (
    NOT_SUPPORTED,
    CommonFields,
    Neutral,
    only,
    parse_request,
    sampling_params,
)
from trio_llm.frontend.http.openai.prompts import prompt_schema
from trio_llm.sampling import SamplingParams

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "MAX_PROMPTS",
    "CompletionRequest",
    "check_num_choices",
    "completion_params",
    "is_prompt_only",
    "parse_completion_request",
]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Of all prompts together."""

_COMPLETION_NOT_SUPPORTED: Mapping[str, Neutral] = {**NOT_SUPPORTED, "suffix": only("")}


class CompletionRequest(CommonFields):
    """Text to continue: one prompt or several."""

    prompt: Annotated[Any, WithJsonSchema(prompt_schema(MAX_PROMPTS))]
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


def check_num_choices(num_prompts: int, n: int) -> None:
    """
    Raises:
        InvalidRequestError: `n` choices for each of the prompts are too many.
    """
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts of {n} choices each are over the limit of {MAX_CHOICES} choices", "n"
        )
