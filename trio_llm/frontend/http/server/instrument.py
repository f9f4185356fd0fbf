"""HttpExchange: what is measured of one HTTP request, at its end.

Pure. Made by the shell, once per request and never per piece of a stream; the app passes it on to what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["CLIENT_HAS_GONE", "ExchangeObserver", "HttpExchange", "describe_exchange"]

CLIENT_HAS_GONE: Final = 499
"""Stands for the status of a request whose client left before an answer began, as in nginx's logs."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpExchange:
    """One request and its answer."""

    path: str
    method: str
    """`other` for one that is not a usual one: a client could send any number of them."""
    status: int
    seconds: float
    """From the end of its head to the end of its answer."""
    request_bytes: int
    """Of the body, as far as it was taken."""
    response_bytes: int | None
    """Of the body, as declared. None: it was streamed, or there was no answer."""


ExchangeObserver = Callable[[HttpExchange], None]


def describe_exchange(
    scope: MutableMapping[str, Any],
    start: MutableMapping[str, Any] | None,
    *,
    seconds: float,
    request_bytes: int,
) -> HttpExchange:
    """
    Args:
        scope: of the request.
        start: the message that the answer began with. None: there was no answer.
    """
    method = scope["method"]
    return HttpExchange(
        path=scope["path"],
        method=method if method in _METHODS else "other",
        status=CLIENT_HAS_GONE if start is None else start["status"],
        seconds=seconds,
        request_bytes=request_bytes,
        response_bytes=None if start is None else _declared_length(start["headers"]),
    )


def _declared_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    return next((int(value) for name, value in headers if name.lower() == b"content-length"), None)
