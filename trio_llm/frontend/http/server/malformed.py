"""What h11 refuses, as errors in our own words: its own show Python's form of what was sent.

Pure. Used by the protocol.
"""

from __future__ import annotations

from typing import Final

import h11

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.server.errors import MalformedRequestError, RequestHeadTooLargeError, TransferCodingError

__all__ = ["malformed_error"]

_REQUEST_LINE: Final = "the request line is malformed; it must be METHOD TARGET HTTP/1.1"
_HEADER_LINE: Final = "a header line is malformed; it must be NAME: VALUE, without control characters"
_WORDS: Final = {
    "illegal request line": _REQUEST_LINE,
    "no request line": _REQUEST_LINE,
    "illegal method": _REQUEST_LINE,
    "illegal target": _REQUEST_LINE,
    "illegal header": _HEADER_LINE,
    "continuation line": "the first header line begins with a space",
    "illegal chunk header": "a chunk of the body is malformed: it must begin with its size in hexadecimal digits",
    "malformed chunk footer": "a chunk of the body is malformed: it does not end where its size says",
    "missing mandatory host": "the header Host is missing",
    "found multiple host": "there are several Host headers",
    "conflicting content-length": "the Content-Length headers contradict each other",
    "bad content-length": "Content-Length is not a number of bytes",
    "multiple transfer-encoding": "there are several Transfer-Encoding headers; only chunked is supported",
    "only transfer-encoding": "the transfer coding is not supported by this server; only chunked is",
}
"""By how h11's message begins, in lower case."""


def malformed_error(error: h11.RemoteProtocolError, *, is_in_body: bool, max_bytes: int) -> InvalidRequestError:
    """The reply to what h11 refuses.

    Args:
        is_in_body: the head had been read.
        max_bytes: what h11 keeps of a head, or of a line between chunks.
    """
    if error.error_status_hint == 431:
        if is_in_body:
            return MalformedRequestError(
                f"a line between two chunks of the body is over the limit of {max_bytes} bytes"
            )
        return RequestHeadTooLargeError(f"the head of the request is over the limit of {max_bytes} bytes")
    text = str(error).lower()
    words = next(
        (own for beginning, own in _WORDS.items() if text.startswith(beginning)), "the request is not HTTP/1.1"
    )
    return TransferCodingError(words) if error.error_status_hint == 501 else MalformedRequestError(words)
