"""RequestTimeout: how long a client gives its request, from the header `X-Request-Timeout` or the field `timeout`.

Used by the routes, by generations and by event streams. The timeout does not cancel a send: half an event would spoil
the error that follows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from trio_llm.config import DAY_S
from trio_llm.errors import InvalidRequestError, RequestTimeoutError
from trio_llm.quoting import quote

__all__ = ["NO_TIMEOUT", "TIMEOUT_HEADER", "RequestTimeout", "timeout_of"]

TIMEOUT_HEADER = "X-Request-Timeout"
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestTimeout:
    """A duration in seconds, and the moment by Trio's clock at which it is over."""

    timeout_s: float = math.inf
    deadline: float = math.inf

    @contextmanager
    def within(self) -> Iterator[None]:
        """Cancel the block when the time is over.

        Raises:
            RequestTimeoutError: that happened.
        """
        with trio.CancelScope(deadline=self.deadline) as scope:
            yield
        if scope.cancelled_caught:
            raise self.error()

    def check(self, now_s: float) -> None:
        """Compare the deadline with `now_s`, by Trio's clock.

        Raises:
            RequestTimeoutError: the time is over.
        """
        if now_s >= self.deadline:
            raise self.error()

    def error(self) -> RequestTimeoutError:
        """The error for a request whose time is over."""
        return RequestTimeoutError(
            f"the request was not finished within {self.timeout_s:g} seconds, its timeout; raise it, or ask for less"
        )


NO_TIMEOUT = RequestTimeout()


def timeout_of(header: str | None, field: float | None, began_s: float) -> RequestTimeout:
    """The timeout that a request asks for, counted from `began_s`. The header takes precedence over the field.

    Raises:
        InvalidRequestError: it is not above 0 and at most a day.
    """
    timeout_s: float | None = field
    param = "timeout"
    if header is not None:
        param = TIMEOUT_HEADER
        timeout_s = float(header) if _DECIMAL.fullmatch(header) else math.nan
    if timeout_s is None:
        return NO_TIMEOUT
    if not 0 < timeout_s <= DAY_S:
        shown = quote(field if header is None else header)
        raise InvalidRequestError(f"{param} must be a number of seconds above 0 and up to {DAY_S}, not {shown}", param)
    return RequestTimeout(timeout_s, began_s + timeout_s)
