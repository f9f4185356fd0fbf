"""BodyReader: the bodies of requests, each read whole under a cap and a time limit, until the server stops.

Used by the shell, one per server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import trio

from trio_llm.config import ServerConfig
from trio_llm.errors import BodyTooLargeError, EngineUnavailableError
from trio_llm.frontend.http.server.errors import BodyTimeoutError

__all__ = ["BodyReader", "content_length"]

STOPPING_S: Final = 1.0
"""How long a body may take that begins while the server stops. It mostly comes with its head."""


class BodyReader:
    """Reads the bodies of all requests of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._limit_bytes = config.max_body_bytes
        self._limit_s = config.body_timeout_s
        self._reading: set[trio.CancelScope] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """The server stops: from now on, refuse bodies that are not whole, those that are being read at once.
        Synchronous."""
        self._is_stopping = True
        for scope in self._reading:
            scope.cancel(reason="the server stops")

    async def read(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], headers: Iterable[tuple[bytes, bytes]]
    ) -> bytes | None:
        """The whole body; None: the client has gone.

        Cancellation: what was read is lost.

        Raises:
            BodyTooLargeError: it is over the cap.
            BodyTimeoutError: the client took too long.
            EngineUnavailableError: the server stops, and the client was not done.
            All leave the rest of the body unread.
        """
        declared = content_length(headers)
        if declared is not None and declared > self._limit_bytes:
            raise BodyTooLargeError(self._limit_bytes)
        with trio.move_on_after(min(self._limit_s, STOPPING_S) if self._is_stopping else self._limit_s) as scope:
            self._reading.add(scope)
            try:
                return await self._read_parts(receive)
            finally:
                self._reading.remove(scope)
        if self._is_stopping:
            raise EngineUnavailableError("the server is shutting down and takes no new requests")
        raise BodyTimeoutError(self._limit_s)

    async def _read_parts(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length of the body that these headers declare, if they do."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)  # h11 has refused anything but one number of at most 20 digits
    return None
