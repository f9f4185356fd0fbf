"""Messages of a conversation: what a caller may give, and the plain form that chat templates get.

Pure. The one place that judges messages, for HTTP and for Trio programs alike. Used by the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import quote
from trio_llm.sampling import is_valid_text

__all__ = ["MAX_MESSAGES", "MAX_PARTS", "ROLES", "TEXT_FIELDS", "UNSUPPORTED_FIELDS", "plain_messages"]

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024
"""Parts of one message."""

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_FIELDS: Final = ("name", "tool_call_id", "reasoning_content")
UNSUPPORTED_FIELDS: Final = ("tool_calls", "function_call", "audio")
"""Fields that would change the prompt. Null and empty ones change nothing. Fields that are not known are left out."""


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of the messages, each with a role and one string as its content.

    A content may be a string, or a list of text parts, which become lines; null is an assistant's empty one.

    Raises:
        InvalidRequestError: a message is malformed or holds more than text; `param` is the place, as
            `messages.2.content.1.text`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(
            f"messages must be a list with at least one message, not {quote(messages)}", "messages"
        )
    # The number is judged before any of them is looked at.
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"{len(messages)} messages are over the limit of {MAX_MESSAGES}", "messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path} must be an object, not {quote(message)}", path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(sorted(ROLES))}, not {quote(role)}", f"{path}.role"
        )
    for name in UNSUPPORTED_FIELDS:
        if message.get(name):
            raise InvalidRequestError(f"{path}.{name} is not supported by this server", f"{path}.{name}")
    plain: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, f"{path}.content")}
    for name in TEXT_FIELDS:
        if message.get(name) is not None:
            plain[name] = _text(message[name], f"{path}.{name}")
    return plain


def _content(content: Any, role: str, path: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return _text(content, path)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{path} must be a string or a list of text parts, not {quote(content)}", path)
    if len(content) > MAX_PARTS:
        raise InvalidRequestError(f"{path} has {len(content)} parts and the limit is {MAX_PARTS}", path)
    return "\n".join([_part(part, f"{path}.{index}") for index, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return _text(part, path)
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{path} must be an object, not {quote(part)}", path)
    if part.get("type") != "text":
        raise InvalidRequestError(
            f"{path}.type must be 'text', not {quote(part.get('type'))}: this server reads text only", f"{path}.type"
        )
    return _text(part.get("text"), f"{path}.text")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path} must be a string, not {quote(value)}", path)
    if not is_valid_text(value):
        raise InvalidRequestError(f"{path} contains a lone surrogate, which is not valid text", path)
    return value
