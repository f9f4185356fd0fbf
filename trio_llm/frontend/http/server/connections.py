"""Connections: HTTP over accepted sockets, by Hypercorn's protocol and not its server.

Used by the host, in place of Hypercorn's `serve` and `TCPServer`. What those do, and what this does instead:

- An error inside one connection ends the server. Here it ends that connection.
- The reader of a connection waits for its app, and the descriptor of one that its client has closed is held until an
  idle timer ends. Here the reader goes on reading whatever happens; when it ends, the descriptor is closed at once.
- Closing amid a request makes the kernel throw away the answer that tells why. Here what the client still sends is
  read and dropped for a while, after the answer, so that it can read that.
- Sends cannot be cancelled, so that a client that reads nothing would hold up the end for as long as the kernel waits
  for it. That stays, and all connections can be closed by force.

The end of what a client sends means that it has gone: its request is cancelled, and nobody gets the answer. A client
that only shuts down its sending side, and means to go on reading (`nc -N`), cannot be told from one that has left,
and running on for those costs more than serving the rare other.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import sys
from contextlib import suppress
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import parse_socket_addr

from trio_llm.config import ServerConfig
from trio_llm.frontend.http.server.http1 import MAX_HEAD_BYTES, Http1Protocol
from trio_llm.frontend.http.server.shell import ASGIApp

__all__ = ["Connections"]

_logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""An idle connection is kept for so long: longer than load balancers keep theirs."""
LINGER_S = 5.0
"""For how long what a client sends after its answer is read and dropped."""
LINGER_BYTES = 64 * 1024 * 1024
"""How much of it."""
RESERVED_DESCRIPTORS = 64
"""Left for the engine's sockets, files and pipes, whatever the limit of connections is."""
ACCEPT_RETRY_S = 0.1
LOG_INTERVAL_S = 10.0
"""A server that has too many connections says so once in this time."""

_RECEIVE_BYTES = 64 * 1024
_NO_ROOM = (EMFILE, ENFILE, ENOBUFS, ENOMEM)


class Connections:
    """All connections of one server."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = ASGIWrapper(app)
        self._max_body_bytes = config.max_body_bytes
        self._limit = _connection_limit(config.max_connections)
        self._config = _hypercorn_config()
        self._context = WorkerContext(None)
        self._open: dict[trio.SocketStream, _Connection] = {}
        self._none_open = trio.Event()
        self._none_open.set()
        self._log_again_at = -math.inf

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept until cancelled, and serve in `nursery`. Connections over the limit are closed at once.

        Cancellation: of this, the listener is closed and connections go on; of `nursery`, connections are closed and
        their requests cancelled, as soon as no send is under way.
        """
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    self._log_rarely("no connection can be accepted now (%s)", os.strerror(error.errno))
                    await trio.sleep(ACCEPT_RETRY_S)
                    continue
                if len(self._open) < self._limit:
                    nursery.start_soon(self._serve, self._add(stream))
                else:
                    stream.socket.close()
                    self._log_rarely("%d connections are open; no more are taken", self._limit)

    async def close_idle(self) -> None:
        """Close connections without a request now, and the others after their answer."""
        await self._context.terminated.set()
        for connection in self._open.values():
            connection.close_if_idle()

    async def wait_none_open(self) -> None:
        """Wait until there is no connection. Cancellation: safe."""
        while self._open:
            await self._none_open.wait()

    def close_by_force(self) -> None:
        """Close every connection, whatever it is doing. Synchronous: it works while the caller is cancelled."""
        for stream in self._open:
            stream.socket.close()

    def _add(self, stream: trio.SocketStream) -> _Connection:
        if not self._open:
            self._none_open = trio.Event()
        connection = _Connection(stream, self._app, self._config, self._context, max_body_bytes=self._max_body_bytes)
        self._open[stream] = connection
        return connection

    async def _serve(self, connection: _Connection) -> None:
        try:
            await connection.run()
        except Exception:
            _logger.exception("a connection failed")
        finally:
            connection.stream.socket.close()
            del self._open[connection.stream]
            if not self._open:
                self._none_open.set()

    def _log_rarely(self, message: str, *values: object) -> None:
        if trio.current_time() >= self._log_again_at:
            self._log_again_at = trio.current_time() + LOG_INTERVAL_S
            _logger.warning(message, *values)


class _Connection:
    """One connection: a task that reads, and one for each request, which the protocol starts."""

    def __init__(
        self,
        stream: trio.SocketStream,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        *,
        max_body_bytes: int,
    ) -> None:
        self.stream = stream
        self._app = app
        self._config = config
        self._context = context
        self._max_body_bytes = max_body_bytes
        self._protocol: Http1Protocol
        self._send_lock = trio.Lock()
        self._receiving = trio.CancelScope()  # around the reader's wait; a new one each time
        self._read_until = trio.current_time() + KEEP_ALIVE_S  # infinite while there is a request
        self._has_next = False  # the reader is to go on with a pipelined request
        self._is_lingering = False  # the last answer has been sent; what comes is dropped

    async def run(self) -> None:
        """Serve until the client closes, or the protocol does, or the connection has been idle for too long."""
        inner = self.stream.socket
        try:
            addresses = [parse_socket_addr(inner.family, name) for name in (inner.getpeername(), inner.getsockname())]
        except OSError:
            return  # the client has gone already
        async with TaskGroup() as tasks:
            self._protocol = Http1Protocol(
                self._app,
                self._config,
                self._context,
                tasks=tasks,
                addresses=(addresses[0], addresses[1]),
                send=self._send,
                max_body_bytes=self._max_body_bytes,
            )
            await self._read()
            inner.close()
            await self._protocol.handle(Closed())

    def close_if_idle(self) -> None:
        """Close now, unless there is a request."""
        if self._read_until < math.inf:
            self._set_read_until(-math.inf)

    async def _read(self) -> None:
        """Feed the protocol until there is nothing more to read."""
        num_dropped = 0
        while num_dropped <= LINGER_BYTES:
            if self._has_next:
                self._has_next = False
                await self._protocol.resume()
                continue
            data = b""
            with trio.CancelScope(deadline=self._read_until) as self._receiving:
                try:
                    data = await self.stream.receive_some(_RECEIVE_BYTES)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
            if self._is_lingering:
                num_dropped += len(data)
            elif data:
                await self._protocol.handle(RawData(data=bytes(data)))
            if not data and not self._has_next:
                return

    async def _send(self, event: object) -> None:
        """What the protocol wants done. From the reader and from the task of a request."""
        if isinstance(event, RawData):
            try:
                async with self._send_lock:
                    with trio.CancelScope(shield=True):  # half a piece must not be all that is sent
                        await self.stream.send_all(event.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._set_read_until(trio.current_time() + KEEP_ALIVE_S if event.idle else math.inf)
            if event.idle and self._protocol.has_next:
                self._has_next = True
                self._receiving.cancel(reason="a pipelined request is here")
        elif isinstance(event, Closed):
            await self._protocol.handle(Closed())
            self._close()

    def _close(self) -> None:
        if not self._protocol.is_client_sending:
            self.stream.socket.close()
        elif not self._is_lingering:
            # Closing a socket with unread bytes sends a reset, and that wipes out what the client has not read.
            self._is_lingering = True
            self._set_read_until(trio.current_time() + LINGER_S)
            with suppress(OSError):
                self.stream.socket.shutdown(socket.SHUT_WR)

    def _set_read_until(self, deadline: float) -> None:
        self._read_until = self._receiving.deadline = deadline


def _connection_limit(wanted: int) -> int:
    """As many as wanted, if this process may have so many descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, descriptors - RESERVED_DESCRIPTORS))


def _hypercorn_config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("trio_llm.hypercorn")
    config.loglevel = "WARNING"
    config.include_server_header = False
    config.include_date_header = False
    config.keep_alive_max_requests = sys.maxsize
    config.h11_max_incomplete_size = MAX_HEAD_BYTES
    return config
