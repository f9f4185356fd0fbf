"""SSE: framing of server-sent events, as bytes.

Pure. Used by the protocols, event streams and the shell.
"""

from __future__ import annotations

from trio_llm.frontend.http.server.errors import ErrorReply

__all__ = ["DONE_EVENT", "EVENT_STREAM_HEADERS", "KEEP_ALIVE", "error_event", "event"]

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers skip it, proxies and dead connections notice it."""

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


def event(data: bytes) -> bytes:
    """One event. `data` holds no line break: JSON has none."""
    return b"data: " + data + b"\n\n"


def error_event(reply: ErrorReply) -> bytes:
    """An error, for a stream whose status line is gone already."""
    return event(reply.body)
