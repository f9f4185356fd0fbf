"""Server-sent events as bytes.

Pure. Used by the protocols, event streams and the shell.
"""

from __future__ import annotations

from trio_llm.frontend.http.server.errors import ErrorReply

__all__ = ["DONE_EVENT", "EVENT_STREAM_HEADERS", "KEEP_ALIVE", "error_event", "event"]

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment. Readers skip it; it keeps proxies from closing the connection and reveals a dead one."""

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx collects events
}


def event(data: bytes) -> bytes:
    """One event. `data` must not hold a line break; JSON does not."""
    return b"data: " + data + b"\n\n"


def error_event(reply: ErrorReply) -> bytes:
    """An error as an event, for a stream whose status line was sent already."""
    return event(reply.body)
