"""CompletionRequest: the body of POST /v1/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.body import Neutral, WholeNumber, only
from trio_llm.frontend.http.openai.fields import NOT_SUPPORTED, CommonFields, sampling_params
from trio_llm.frontend.http.openai.schemas import INT64_MAX, Schema, bounded, implies, prompt_schema
from trio_llm.sampling import MAX_LOGPROBS, SamplingParams

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "MAX_PROMPTS",
    "CompletionRequest",
    "check_num_choices",
    "completion_params",
    "is_prompt_only",
    "limit_to_room",
]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Choices of one request, over all its prompts."""


class CompletionRequest(CommonFields):
    """Text to continue: one prompt or several."""

    not_supported: ClassVar[Mapping[str, Neutral]] = {**NOT_SUPPORTED, "suffix": only("")}

    rules: ClassVar[tuple[Schema, ...]] = (
        *CommonFields.rules,
        implies("max_tokens", {"const": 0}, "echo", {"const": True}),
        implies("max_tokens", {"const": 0}, "min_tokens", {"enum": [0, None]}, is_needed=False),
        {
            "if": {"properties": {"max_tokens": {"type": "null"}}},
            "then": {"properties": {"min_tokens": {"maximum": DEFAULT_MAX_TOKENS}}},
        },
    )

    prompt: Annotated[Any, WithJsonSchema(prompt_schema(MAX_PROMPTS))]
    max_tokens: Annotated[WholeNumber | None, bounded(0, INT64_MAX)] = None
    logprobs: Annotated[WholeNumber | None, bounded(0, MAX_LOGPROBS)] = None
    echo: bool | None = None


def completion_params(request: CompletionRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """The parameters, as far as they do not depend on the prompts: see `limit_to_room`.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    max_tokens, logprobs, prompt_logprobs = request.max_tokens, request.logprobs, request.prompt_logprobs
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    elif is_prompt_only(request):
        if request.min_tokens is not None and request.min_tokens > 0:
            raise InvalidRequestError(
                f"min_tokens ({request.min_tokens}) must not be above max_tokens (0)", "min_tokens"
            )
        max_tokens = 1  # the engine cannot do with less; it is not shown
    if request.echo and logprobs is not None and (prompt_logprobs is None or 0 <= prompt_logprobs < logprobs):
        prompt_logprobs = logprobs  # one pass over the prompt serves both fields
    return sampling_params(
        request, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, defaults=defaults
    )


def limit_to_room(request: CompletionRequest, params: SamplingParams, *, room: int) -> SamplingParams:
    """A request that names no limit gets what the context has left. One that wants more is refused at admission.

    Args:
        room: tokens that the context has left for the answer.

    Raises:
        InvalidRequestError: `min_tokens` is above that.
    """
    if request.max_tokens is None and room < DEFAULT_MAX_TOKENS:
        return msgspec.structs.replace(params, max_tokens=max(1, room))
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
