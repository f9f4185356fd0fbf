"""ChatRequest: the body of POST /v1/chat/completions.

Pure. Used by its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.errors import quote
from trio_llm.frontend.http.openai.fields import (
    NOT_SUPPORTED,
    CommonFields,
    Neutral,
    only,
    parse_request,
    sampling_params,
)
from trio_llm.sampling import MAX_LOGPROBS, SamplingParams

__all__ = ["MAX_MESSAGES", "MAX_PARTS", "ChatRequest", "chat_messages", "chat_params", "parse_chat_request"]

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of one message."""
MAX_TEMPLATE_KWARGS = 64
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_CHAT_NOT_SUPPORTED: Mapping[str, Neutral] = {
    **NOT_SUPPORTED,
    "tools": only(),
    "tool_choice": only("none", "auto"),
    "functions": only(),
    "function_call": only("none", "auto"),
    "chat_template": only(),
    "documents": only([]),
    "reasoning_effort": only("none"),
    "add_special_tokens": only(False),
}


class ChatRequest(CommonFields):
    """A conversation to continue."""

    messages: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_MESSAGES),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"type": "object"}}),
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


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a JSON object.

    Raises:
        InvalidRequestError: `param` names the field at fault.
    """
    # The number of messages is judged before any is looked at.
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"{len(messages)} messages are over the limit of {MAX_MESSAGES}", "messages")
    request = parse_request(ChatRequest, body, _CHAT_NOT_SUPPORTED)
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    return request


def chat_params(request: ChatRequest) -> SamplingParams:
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
    has_new_name = request.max_completion_tokens is not None
    max_tokens = request.max_completion_tokens if has_new_name else request.max_tokens
    try:
        return sampling_params(request, max_tokens=max_tokens, logprobs=top if request.logprobs else None)
    except InvalidRequestError as error:
        if has_new_name and error.param == "max_tokens":
            raise InvalidRequestError(
                str(error).replace("max_tokens", "max_completion_tokens", 1), "max_completion_tokens"
            ) from None
        raise


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as templates want them: a role, and text in one string.

    Raises:
        InvalidRequestError: a message is malformed or holds more than text; `param` is its dotted path.
    """
    return [_message(message, f"messages.{index}") for index, message in enumerate(request.messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object, not {quote(message)}", path)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(sorted(_ROLES))}, not {quote(role)}", f"{path}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise InvalidRequestError(f"{path}.{name} is not supported by this server", f"{path}.{name}")
    plain: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, f"{path}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequestError(f"{path}.{name} must be a string, not {quote(value)}", f"{path}.{name}")
        plain[name] = value
    return plain


def _content(content: Any, role: str, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path} must be a string or a list of text parts, not {quote(content)}", path)
    if len(content) > MAX_PARTS:
        raise InvalidRequestError(f"{path} has {len(content)} parts and the limit is {MAX_PARTS}", path)
    return "\n".join(_part(part, f"{path}.{index}") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{path} must be an object, not {quote(part)}", path)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{path}.type must be 'text', not {quote(part.get('type'))}: this server reads text only", f"{path}.type"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{path}.text must be a string, not {quote(part.get('text'))}", f"{path}.text")
    return str(part["text"])
