"""Trace headers: which of a request's headers name the span that it belongs to. W3C Trace Context.

Pure. Used by the submitter, for what programs pass, and by the reader of HTTP requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trio_llm.errors import InvalidRequestError

__all__ = ["TRACE_HEADERS", "pick_trace_headers"]

TRACE_HEADERS: Final = ("traceparent", "tracestate")


def pick_trace_headers(headers: Any) -> Mapping[str, str] | None:
    """The trace headers among `headers`, whose names may be in any case; None if there is no `traceparent`.

    What they say is not checked: a request whose trace headers are malformed begins a trace of its own.

    Raises:
        InvalidRequestError: it is no mapping of texts.
    """
    if not isinstance(headers, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in headers.items()
    ):
        raise InvalidRequestError("trace_headers must be a mapping of header names to texts", "trace_headers")
    picked = {low: value for name, value in headers.items() if (low := name.lower()) in TRACE_HEADERS}
    return picked if "traceparent" in picked else None
