"""ChatRequest: the body of POST /v1/chat/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.answers.client_names import in_client_names
from trio_llm.frontend.http.openai.body import Neutral, WholeNumber, only
from trio_llm.frontend.http.openai.fields import NOT_SUPPORTED, CommonFields, sampling_params
from trio_llm.frontend.http.openai.schemas import INT64_MAX, MESSAGES, Schema, bounded, implies
from trio_llm.frontend.rendering.chat_template import RESERVED_KWARGS
from trio_llm.quoting import quote
from trio_llm.sampling import MAX_LOGPROBS, SamplingParams

__all__ = ["ChatRequest", "chat_params", "param_names"]

MAX_TEMPLATE_KWARGS = 64

TemplateKwarg = Annotated[str, Field(json_schema_extra={"not": {"enum": sorted(RESERVED_KWARGS)}})]


class ChatRequest(CommonFields):
    """A conversation to continue."""

    not_supported: ClassVar[Mapping[str, Neutral]] = {
        **NOT_SUPPORTED,
        "tools": only([]),
        "tool_choice": only("none", "auto"),
        "functions": only([]),
        "function_call": only("none", "auto"),
        "chat_template": only(),
        "documents": only([]),
        "reasoning_effort": only("none"),
        "echo": only(False),
    }

    rules: ClassVar[tuple[Schema, ...]] = (
        *CommonFields.rules,
        implies("top_logprobs", {"type": "integer", "not": {"const": 0}}, "logprobs", {"const": True}),
        implies(
            "continue_final_message",
            {"const": True},
            "add_generation_prompt",
            {"enum": [False, None]},
            is_needed=False,
        ),
    )

    # Judged by the renderer, as those of any other caller.
    messages: Annotated[Any, WithJsonSchema(MESSAGES)]
    max_completion_tokens: Annotated[WholeNumber | None, bounded(1, INT64_MAX)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[WholeNumber | None, bounded(0, MAX_LOGPROBS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[TemplateKwarg, Any] | None, Field(max_length=MAX_TEMPLATE_KWARGS)] = None

    def check_together(self) -> None:
        super().check_together()
        # The newer name goes before the older one, which is judged all the same.
        if self.max_tokens is not None and not 1 <= self.max_tokens <= INT64_MAX:
            raise InvalidRequestError(
                f"max_tokens must be an integer from 1 to {INT64_MAX}, not {quote(self.max_tokens)}", "max_tokens"
            )

    @property
    def repeats_prompt(self) -> bool:
        """The answer has something of the prompt: its ids, its text, or its log-probabilities."""
        return bool(self.return_token_ids or self.return_prompt_text) or self.prompt_logprobs is not None

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
