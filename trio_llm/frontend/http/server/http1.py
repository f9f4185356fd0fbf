"""Http1Protocol: Hypercorn's HTTP/1.1 state machine, with a reader that never waits and refusals that say why.

Used by `connections`, one per connection. What Hypercorn's `H11Protocol` does, and what this does instead:

- While a request is answered and more bytes wait behind it, it puts the connection's only reader to sleep, which then
  cannot see the client leave. Here the bytes stay where they are; `has_next` says when the reader has to come back.
- It sends `100 Continue` to every client that asks. Here a client with too large a body gets its 413 at once.
- Its reply to a malformed request has no body, and it accepts a request with two lengths or with any number of
  headers. See `_refusal`.
- It takes a blank line between requests for a malformed request (RFC 9112, 2.2), and the absolute form of a target for
  a path (3.2.2).
- It switches to HTTP/2 and to WebSockets. Neither is served here: an offer to upgrade is ignored, as RFC 9110, 7.8
  allows, and the first bytes of HTTP/2 get a GOAWAY that asks for HTTP/1.1.
- Its responses get a date that is formatted anew each time, and each piece of a stream goes through h11.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from importlib.metadata import version
from typing import Final

import h11
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.server.body_reader import content_length
from trio_llm.frontend.http.server.errors import (
    HttpVersionError,
    MalformedRequestError,
    RequestHeadTooLargeError,
    reply_for,
)
from trio_llm.frontend.http.server.malformed import malformed_error
from trio_llm.frontend.http.server.shell import client_request_id

__all__ = ["HYPERCORN_VERSION", "Http1Config", "Http1Protocol", "check_hypercorn"]

HYPERCORN_VERSION: Final = "0.18.0"
MAX_HEADERS: Final = 100
MAX_HEAD_BYTES: Final = 16 * 1024
"""Approximate: separators count as four bytes per line."""
MAX_BYTES_BEHIND: Final = 1024 * 1024
"""How much of pipelined requests is kept while an earlier request is answered. Beyond it, that answer is the last.

Many times what can arrive between the last byte of an answer and the next turn of the task that sent it: a client may
be that quick with its next request."""

_HTTP_2_GOAWAY: Final = (
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty SETTINGS frame, which has to come first
    b"\x00\x00\x14\x07\x00\x00\x00\x00\x00"  # GOAWAY, 20 bytes:
    b"\x00\x00\x00\x00\x00\x00\x00\x0duse HTTP/1.1"  # no stream was served; HTTP_1_1_REQUIRED; for debugging
)
"""RFC 9113, 6.8 and 7."""


def check_hypercorn(found: str) -> None:
    """Make sure that this is the version of Hypercorn whose internals this module builds on.

    Raises:
        ImportError: it is another one.
    """
    if found != HYPERCORN_VERSION:
        raise ImportError(
            f"the server needs hypercorn {HYPERCORN_VERSION} and found {found}: it builds on what no other version "
            f"promises; pip install hypercorn=={HYPERCORN_VERSION}"
        )


check_hypercorn(version("hypercorn"))


class Http1Config(Config):  # type: ignore[misc]  # hypercorn is not followed: see pyproject.toml
    """Hypercorn's settings for `Http1Protocol`.

    Args:
        max_body_bytes: a client that announces more gets no `100 Continue`.
        clock: seconds since the epoch.
    """

    def __init__(self, *, max_body_bytes: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.max_body_bytes = max_body_bytes
        self.accesslog = None
        self.errorlog = logging.getLogger("trio_llm.hypercorn")
        self.loglevel = "WARNING"
        self.keep_alive_max_requests = sys.maxsize
        self.h11_max_incomplete_size = MAX_HEAD_BYTES
        self._clock = clock
        self._date_s = -1
        self._headers: list[tuple[bytes, bytes]] = []

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """Headers that every response has: its date (RFC 9110, 6.6.1), which is formatted once a second."""
        now_s = int(self._clock())
        if now_s != self._date_s:
            self._date_s = now_s
            self._headers = [(b"date", formatdate(now_s, usegmt=True).encode("ascii"))]
        return self._headers


class Http1Protocol(H11Protocol):  # type: ignore[misc]  # hypercorn is not followed: see pyproject.toml
    """The protocol of one connection, driven by `handle`, `resume` and the end of each answer.

    Args:
        addresses: host and port of the client, then of the server.
        send: carries out an event: bytes to write, the connection is idle or busy, the connection is to be closed.
        write: writes bytes, as `send` does for an event that holds them.
    """

    connection: h11.Connection

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        config: Http1Config,
        context: WorkerContext,
        *,
        tasks: TaskGroup,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        send: Callable[[object], Awaitable[None]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        super().__init__(app, config, context, tasks, ConnectionState({}), False, *addresses, send)
        self._write = write
        self._max_body_bytes = config.max_body_bytes
        self._is_chunked = False  # the body that is being sent
        self._num_behind = 0  # bytes that have come behind the request that is being answered

    @property
    def has_next(self) -> bool:
        """The last request is over, and bytes of another one are here: call `resume`."""
        return self.connection.their_state is h11.IDLE and bool(self.connection.trailing_data[0])

    @property
    def is_client_sending(self) -> bool:
        """The client has not sent all of its request, or has sent more than that."""
        done = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return self._num_behind > 0 or self.connection.their_state not in done or bool(self.connection.trailing_data[0])

    async def handle(self, event: object) -> None:
        """Take bytes that have arrived (from one task only), or that the connection is closed (from any task)."""
        if not isinstance(event, RawData):
            await super().handle(event)
        elif self._keep(event.data):
            await self._handle_events()

    async def resume(self) -> None:
        """Go on with the bytes that are here. Call it from the task that calls `handle`."""
        await self._handle_events()

    async def stream_send(self, event: object) -> None:
        """Send a piece of an answer. Called by the task of the request."""
        if isinstance(event, Body) and self._is_chunked:
            # As h11 would frame it, at a tenth of the price: h11 counts nothing of a chunked body.
            await self._write(b"%x\r\n%b\r\n" % (len(event.data), event.data))
            return
        if isinstance(event, Response):
            has_length = any(name == b"content-length" for name, _ in event.headers)
            self._is_chunked = self.connection.their_http_version == b"1.1" and not has_length
        await super().stream_send(event)

    def _keep(self, data: bytes) -> bool:
        """Put bytes into h11's buffer. Returns whether they are wanted."""
        connection = self.connection
        if connection.their_state is h11.IDLE and not connection.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        elif connection.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._num_behind += len(data)
            if self._num_behind > MAX_BYTES_BEHIND:
                return False
        if data:
            connection.receive_data(data)
        return bool(data)

    async def _handle_events(self) -> None:
        while True:
            is_in_body = self.connection.their_state is h11.SEND_BODY
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(malformed_error(error, is_in_body=is_in_body, max_bytes=MAX_HEAD_BYTES))
                return
            if isinstance(event, h11.Request):
                await self._begin(event)
            elif self.stream is None:  # refused, or answered before the body was whole
                return
            elif isinstance(event, h11.Data):
                await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                # What is behind it waits until the answer has ended: h11 would call it an error of this request if it
                # is the connection's last.
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
                return
            else:  # NEED_DATA, PAUSED
                return

    async def _begin(self, request: h11.Request) -> None:
        await self.send(Updated(idle=False))
        if (request.method, request.target, request.http_version) == (b"PRI", b"*", b"2.0"):
            await self.send(RawData(data=_HTTP_2_GOAWAY))
            await self.send(Closed())
        elif (refusal := _refusal(request)) is not None:
            await self._refuse(refusal, request)
        else:
            await self._create_stream(request)
            if self.connection.they_are_waiting_for_100_continue and not self._is_too_large(request):
                await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    def _is_too_large(self, request: h11.Request) -> bool:
        return (content_length(request.headers) or 0) > self._max_body_bytes

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _refuse(self, error: InvalidRequestError, request: h11.Request | None = None) -> None:
        """Answer with `error`, unless an answer has begun, and close."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = reply_for(error)
            request_id = client_request_id(request.headers if request else ()) or uuid.uuid4().hex
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(reply.body)),
                (b"x-request-id", request_id.encode("latin-1")),
                (b"connection", b"close"),
                *reply.headers,
                *self.config.response_headers("h11"),
            ]
            await self._send_h11_event(h11.Response(status_code=reply.status, headers=headers))
            if request is None or request.method != b"HEAD":
                await self._send_h11_event(h11.Data(data=reply.body))
            await self._send_h11_event(h11.EndOfMessage())
        await self.send(Closed())

    async def _maybe_recycle(self) -> None:
        """At the end of an answer, in its task: be ready for the next request, or close."""
        await self._close_stream()
        is_done = self.connection.our_state is self.connection.their_state is h11.DONE
        if not is_done or self._num_behind > MAX_BYTES_BEHIND or self.context.terminated.is_set():
            await self.send(Closed())
            return
        behind = self.connection.trailing_data[0]
        self._num_behind = 0
        self.connection.start_next_cycle()
        if behind.startswith((b"\r", b"\n")):
            # Bytes cannot be taken back from h11, so a new h11 gets them without the blank lines.
            self.connection = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
            if behind := behind.lstrip(b"\r\n"):
                self.connection.receive_data(behind)
        await self.send(Updated(idle=True))


def _refusal(request: h11.Request) -> InvalidRequestError | None:
    """The error for a request that h11 accepts and this server does not; None: it is fine."""
    names = {name for name, _ in request.headers}
    if not request.http_version.startswith(b"1."):
        return HttpVersionError(request.http_version.decode("ascii"))
    if len(request.headers) > MAX_HEADERS:
        return RequestHeadTooLargeError(f"{len(request.headers)} header lines are more than the limit of {MAX_HEADERS}")
    # h11 has the same limit for what is incomplete only: not for a head that arrives at once, or behind a request.
    size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
    if size > MAX_HEAD_BYTES:
        return RequestHeadTooLargeError(f"a head of {size} bytes is over the limit of {MAX_HEAD_BYTES}")
    if b"transfer-encoding" in names and b"content-length" in names:
        # RFC 9112, 6.3: a proxy in front of this server may have believed the other length.
        return MalformedRequestError("Content-Length and Transfer-Encoding exclude each other")
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        return MalformedRequestError("HTTP/1.0 has no Transfer-Encoding")
    return None


def _origin_form(target: bytes) -> bytes:
    """The target without scheme and authority: `/health` for `http://x/health`."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    path_at = min((at for mark in (b"/", b"?") if (at := rest.find(mark)) >= 0), default=len(rest))
    return rest[path_at:] if rest[path_at : path_at + 1] == b"/" else b"/" + rest[path_at:]
