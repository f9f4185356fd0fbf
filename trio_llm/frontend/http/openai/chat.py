"""ChatRequest: the body of POST /v1/chat/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.answers.client_names import in_client_names
from trio_llm.frontend.http.openai.fields import (
    NOT_SUPPORTED,
    CommonFields,
    Neutral,
    only,
    sampling_params,
)
from trio_llm.frontend.rendering.messages import MAX_MESSAGES
from trio_llm.quoting import quote
from trio_llm.sampling import MAX_LOGPROBS, SamplingParams

__all__ = ["ChatRequest", "chat_params", "param_names"]

MAX_TEMPLATE_KWARGS = 64


class ChatRequest(CommonFields):
    """A conversation to continue."""

    not_supported: ClassVar[Mapping[str, Neutral]] = {
        **NOT_SUPPORTED,
        "tools": only(),
        "tool_choice": only("none", "auto"),
        "functions": only(),
        "function_call": only("none", "auto"),
        "chat_template": only(),
        "documents": only([]),
        "reasoning_effort": only("none"),
        "add_special_tokens": only(False),
        "echo": only(False),
    }

    # Judged by the renderer, as those of any other caller.
    messages: Annotated[
        Any, WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"type": "object"}})
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=MAX_TEMPLATE_KWARGS)] = None

    @property
    def adds_generation_prompt(self) -> bool:
        """The template opens the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def chat_params(request: ChatRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: a value is out of range.
    """
    top = request.top_logprobs or 0
    if top and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, not {quote(top)}", "top_logprobs"
        )
    max_tokens = request.max_completion_tokens
    try:
        return sampling_params(
            request,
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
            logprobs=top if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            defaults=defaults,
        )
    except InvalidRequestError as error:
        raise in_client_names(error, param_names(request)) from None


def param_names(request: ChatRequest) -> Mapping[str, str]:
    """Fields of SamplingParams that the client has called otherwise, with its name for them."""
    return {} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
