"""Shell: one ASGI layer around every route, streaming or not.

Reads the body under a cap, runs the inner app beside a task that waits for the client to leave, cancels the app when
the client does, and turns what the app raises into a reply. The inner app gets the whole body in one message.

What Hypercorn asks of an app, met here once for all routes: a body that is not read blocks the reader of its connection
for ever; sending does not fail after a disconnect; and the last body message puts a disconnect into the app's queue
before the connection is recycled, so it must be sent outside the scope that a disconnect cancels, or the connection
leaks. A refused body is answered before it is read: the connection, which closes, lets the client read the answer.

What a request holds is freed with its last reference: the shell leaves nothing for the cyclic garbage collector, which
may come minutes later. `tests/frontend/http/server/test_memory.py` holds it to that.
"""

from __future__ import annotations

import logging
import string
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import trio

from trio_llm.config import ServerConfig
from trio_llm.errors import TrioLLMError
from trio_llm.frontend.http.server.body_reader import BodyReader
from trio_llm.frontend.http.server.errors import ErrorReply, HttpVersionError, only_error, reply_for
from trio_llm.frontend.http.server.instrument import ExchangeObserver, describe_exchange
from trio_llm.frontend.http.server.sse import DONE_EVENT, error_event

__all__ = ["ASGIApp", "Message", "Receive", "Scope", "Send", "Shell", "client_request_id", "reply_to"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:/+=@")


class Shell:
    """The outermost ASGI app.

    Args:
        app: gets scopes of type `http` only, with `state` holding `request_id` and `client_request_id` (the
            `X-Request-Id` header, or None); its `receive` gives the body in one message.
        is_draining: called once per response; while it is true, connections close after their answer.
        observe: called once per request, when all of it is over. Synchronous; must not raise.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        *,
        is_draining: Callable[[], bool],
        observe: ExchangeObserver | None = None,
    ) -> None:
        self._app = app
        self._observe = observe
        self._bodies = BodyReader(config)
        self._is_draining = is_draining
        self._num_requests = 0
        self._idle = trio.Event()
        self._idle.set()

    def stop_reading(self) -> None:
        """The server stops: requests whose bodies are not whole get 503. Synchronous."""
        self._bodies.stop()

    async def wait_idle(self) -> None:
        """Wait until no request is being answered.

        Cancellation: safe.
        """
        while self._num_requests:
            await self._idle.wait()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one scope.

        Cancellation: the inner app is cancelled and nothing more is sent.
        """
        # Not a coroutine function, here and in the app: each would be one more frame to resume for every token.
        if scope["type"] == "http":
            return self._serve_http(scope, receive, send)
        if scope["type"] == "lifespan":
            return _serve_lifespan(receive, send)
        return _refuse_websocket(receive, send)

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_requests == 0:
            self._idle = trio.Event()
        self._num_requests += 1
        began_s = trio.current_time()
        exchange = _Exchange(scope, receive, send, is_draining=self._is_draining)
        try:
            await exchange.run(self._app, self._bodies)
        finally:
            if self._observe is not None:
                seconds, num_bytes = trio.current_time() - began_s, exchange.num_body_bytes
                self._observe(describe_exchange(scope, exchange.start, seconds=seconds, request_bytes=num_bytes))
            self._num_requests -= 1
            if self._num_requests == 0:
                self._idle.set()


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_draining: Callable[[], bool]) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_draining = is_draining
        client_id = client_request_id(scope["headers"])
        self._request_id = client_id or uuid.uuid4().hex
        # Hypercorn copies the state for each request.
        scope.setdefault("state", {}).update(request_id=self._request_id, client_request_id=client_id)
        self._body: bytes | None = None  # None: handed to the app
        self._has_gone = trio.Event()
        self._response: Message | None = None  # http.response.start as the app sent it
        self._error_start: Message | None = None  # http.response.start of an error in place of the app's
        self._final: Message | None = None  # the last body message, kept back
        self._body_left = True  # some of the request's body was not read
        self.num_body_bytes = 0
        self.start: Message | None = None
        """The message that the answer began with. Set at the end."""

    async def run(self, app: ASGIApp, bodies: BodyReader) -> None:
        """Serve the request, to the last message of its answer."""
        try:
            self._body = await bodies.read(self._receive, self._scope["headers"])
            self._body_left = False
            if self._body is None:
                self._has_gone.set()
            else:
                self.num_body_bytes = len(self._body)
            if not self._is_http_1:
                raise HttpVersionError(self._scope["http_version"])
            if not self._has_gone.is_set():
                await self._run_app(app)
        except (Exception, BaseExceptionGroup) as error:
            self._answer_error(error)
        try:
            if not self._has_gone.is_set():
                await self._finish()
        finally:
            # The task that waited for the client was ended by an exception, which may hold this object for a while.
            self.start = self._error_start or self._response
            self._body = self._response = self._error_start = self._final = None

    @property
    def _is_http_1(self) -> bool:
        return str(self._scope["http_version"]).startswith("1.")

    # -------------------------------------------------------------------------------------- reading

    async def _watch_disconnect(self, app_scope: trio.CancelScope) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_gone.set()
        app_scope.cancel(reason="the client has gone")

    async def _receive_for_app(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_gone.wait()
        return {"type": "http.disconnect"}

    # -------------------------------------------------------------------------------------- running

    async def _run_app(self, app: ASGIApp) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_disconnect, nursery.cancel_scope)
            # A client that has gone already must not cost anything. Three turns: the watcher starts, takes the
            # message that waits, and cancels.
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            try:
                await app(self._scope, self._receive_for_app, self._send_for_app)
                if self._final is None and not self._has_gone.is_set():
                    raise RuntimeError("the app returned without finishing its response")
            except (Exception, BaseExceptionGroup) as error:
                # Inside the nursery, which would tie the error, and with it the frames of the app, into a ring.
                self._answer_error(error)
            nursery.cancel_scope.cancel(reason="the app has answered")

    async def _send_for_app(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._response = self._with_headers(message)
            if not self._has_gone.is_set():
                await self._send(self._response)
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._final = message
        elif not self._has_gone.is_set():
            await self._send(message)

    def _with_headers(self, message: Message) -> Message:
        headers = list(message.get("headers", ()))
        names = {name for name, _ in headers}
        if b"x-request-id" not in names:
            headers.append((b"x-request-id", self._request_id.encode("latin-1")))
        is_last = self._is_draining() or self._body_left
        if is_last and b"connection" not in names and self._is_http_1:  # HTTP/2 has no such header
            headers.append((b"connection", b"close"))
        return {**message, "headers": headers}

    # -------------------------------------------------------------------------------------- ending

    def _answer_error(self, error: BaseException) -> None:
        """Choose the ending that is still possible for what was raised; raise what includes a cancellation."""
        reply = reply_to(error, self._request_id)
        if self._response is None:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(reply.body)),
                *reply.headers,
            ]
            self._error_start = {"type": "http.response.start", "status": reply.status, "headers": headers}
            self._final = {"type": "http.response.body", "body": reply.body}
        elif _is_event_stream(self._response):
            self._final = {"type": "http.response.body", "body": error_event(reply) + DONE_EVENT}
        else:
            # The client expects a whole body: only a connection that closes before its end shows the error.
            self._final = None

    async def _finish(self) -> None:
        """Send the last message, with nothing around it that a disconnect cancels."""
        if not self._body_left:
            await self._send_ending()
            return
        async with trio.open_nursery() as nursery:
            # While body messages wait in the app's queue, Hypercorn's reader blocks on it, and so would its
            # writer when it announces the end: go on taking them.
            nursery.start_soon(self._drop_messages)
            await self._send_ending()

    async def _send_ending(self) -> None:
        if self._error_start is not None:
            await self._send(self._with_headers(self._error_start))
        if self._final is not None:
            await self._send({**self._final, "more_body": False})

    async def _drop_messages(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def reply_to(error: BaseException, request_id: str) -> ErrorReply:
    """The reply to what a request has raised. Logs errors that are not ours, and drops tracebacks and causes.

    Raises:
        BaseException: `error` itself, if it is or holds more than an error: this task is cancelled from outside, or
            the interpreter is to end. Nothing may be answered then.
    """
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, ExceptionGroup):
        raise error
    cause = only_error(error)
    if not isinstance(cause, Exception):
        raise error
    if not isinstance(cause, TrioLLMError):
        _logger.error("request %s failed", request_id, exc_info=cause)
    _cut_loose(error)
    return reply_for(cause)


def _cut_loose(error: BaseException) -> None:
    """Drop what `error`, and the errors inside it and behind it, hold of the request.

    A frame in a traceback may hold the error, and holds what its function had: the body, and all read from it. So do
    the frames of errors behind it, which `from None` hides and keeps.
    """
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None:
            continue
        todo += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
        # Links first: an error that comes again, or a ring of them, has none any more.
        one.__cause__ = one.__context__ = one.__traceback__ = None


def _is_event_stream(response: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in response["headers"]
    )


def client_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The client's id for the request, if it is one that may stand in a header and in a log."""
    for name, value in headers:
        if name == b"x-request-id":
            text = str(value, "latin-1")
            if 0 < len(text) <= MAX_REQUEST_ID_CHARS and _REQUEST_ID_CHARS.issuperset(text):
                return text
    return None


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect; closing before accepting is a refusal
    await send({"type": "websocket.close", "code": 1000})


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge each message. What lives longer than a request is owned by the block around the server."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
