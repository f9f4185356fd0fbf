"""Errors as replies: the one place that turns an exception into a status, headers and a body in OpenAI's shape.

Pure. Used by the shell for every route, and by event streams once their response has started. Imports neither
Starlette nor pydantic: the shell answers before they are loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from trio_llm.errors import InvalidRequestError, TrioLLMError
from trio_llm.quoting import MAX_QUOTED_CHARS, quote

__all__ = [
    "BodyTimeoutError",
    "ErrorReply",
    "HttpVersionError",
    "MalformedRequestError",
    "MethodNotAllowedError",
    "RequestHeadTooLargeError",
    "RouteNotFoundError",
    "TransferCodingError",
    "WebPageError",
    "only_error",
    "reply_for",
]

MAX_MESSAGE_CHARS = 4000


class RouteNotFoundError(InvalidRequestError):
    """There is nothing at this path."""

    status = 404
    kind = "not_found_error"

    def __init__(self, path: str) -> None:
        super().__init__(f"there is nothing at the path {quote(path)}")


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, for other methods."""

    status = 405

    def __init__(self, method: str, allow: str) -> None:
        super().__init__(f"the method {quote(method)} is not allowed here; allowed: {allow}")
        self.allow = allow


class BodyTimeoutError(InvalidRequestError):
    """The client did not send its body in time."""

    status = 408

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request body did not arrive within {timeout_s:g} seconds")


class WebPageError(InvalidRequestError):
    """A browser has sent the request on behalf of a web page, and the path is for programs."""

    status = 403
    kind = "permission_error"

    def __init__(self, header: str) -> None:
        super().__init__(f"this path takes no requests from web pages (the request has the header {header})")


class HttpVersionError(InvalidRequestError):
    """The request came over a version of HTTP that is not served."""

    status = 505

    def __init__(self, version: str) -> None:
        super().__init__(f"HTTP/{version} is not supported by this server; use HTTP/1.1")


class MalformedRequestError(InvalidRequestError):
    """The request is not HTTP, or not safe to read as HTTP. The connection is closed."""


class RequestHeadTooLargeError(InvalidRequestError):
    """The head of the request is too long, or has too many lines."""

    status = 431


class TransferCodingError(InvalidRequestError):
    """The body comes in a transfer coding other than `chunked`."""

    status = 501


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A status, a JSON body, and headers besides content type and length."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def reply_for(error: BaseException) -> ErrorReply:
    """The reply to any exception. The text of an unexpected one stays in the log."""
    if not isinstance(error, TrioLLMError):
        message = "internal server error; the log of the server has the cause"
        return _reply(500, message, "server_error", None, [(b"x-should-retry", b"false")])
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", error.allow.encode("latin-1")))
    retry_after_s = error.retry_after_s
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
    if error.status >= 500 and not error.can_retry:
        # Without this header clients repeat any 5xx.
        headers.append((b"x-should-retry", b"false"))
    return _reply(error.status, str(error), error.kind, error.param, headers)


def only_error(error: BaseException) -> BaseException:
    """The exception inside groups of one; of a larger group, one of ours if there is any, else the first.

    The groups must not contain `trio.Cancelled`: code that catches a cancellation re-raises it.
    """
    while isinstance(error, BaseExceptionGroup):
        members = error.exceptions
        error = next((member for member in members if isinstance(only_error(member), TrioLLMError)), members[0])
    return error


def _reply(status: int, message: str, kind: str, param: str | None, headers: list[tuple[bytes, bytes]]) -> ErrorReply:
    error = {
        "message": _clean(message[:MAX_MESSAGE_CHARS]),
        "type": kind,
        "param": None if param is None else _clean(param[:MAX_QUOTED_CHARS]),
        "code": status,
    }
    return ErrorReply(status, msgspec.json.encode({"error": error}), tuple(headers))


def _clean(text: str) -> str:
    """`text` without lone surrogates, which have no UTF-8 form."""
    return text.encode("utf-8", "replace").decode()
