"""Connections: HTTP/1.1 over accepted sockets, by Hypercorn's protocol and not by its server.

Used by `serve`, in place of Hypercorn's `serve` and `TCPServer`. What those do, and what this does instead:

- An error inside one connection ends the server. Here it ends that connection.
- The reader of a connection waits for its app, and the descriptor of a connection that the client has closed is held
  until an idle timer ends. Here the reader goes on reading while the app runs, and the descriptor is closed as soon as
  the reader has seen the end.
- Closing amid a request makes the kernel discard the answer that says why. Here the server goes on reading, and drops
  what it reads, for a while after such an answer.
- Sending takes a lock and a shield, two schedule points for each piece of a stream, and cannot be cancelled. Here a
  piece that the kernel takes at once has no schedule point, and a send that has to wait can be cancelled.

The end of a client's input counts as the client's departure: its request is cancelled. A client that shuts down only
its sending side and means to go on reading (`nc -N`) looks the same as one that has left. Working on for departed
clients would cost more than serving those few.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from errno import EBADF, EINVAL, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOTSOCK, EOPNOTSUPP, ETIMEDOUT
from typing import Final

import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import parse_socket_addr

from trio_llm.config import ServerConfig
from trio_llm.frontend.http.server.http1 import Http1Config, Http1Protocol
from trio_llm.frontend.http.server.listeners import SEND_STALL_S
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send

__all__ = ["Connections"]

_logger = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75.0
"""How long an idle connection is kept: longer than load balancers keep theirs."""
LINGER_S: Final = 5.0
"""How long the server reads and drops what a client sends after its answer."""
LINGER_BYTES: Final = 64 * 1024 * 1024
"""How much of it the server reads."""
BYTES_PER_TURN: Final = 64 * 1024
"""A connection that has written more than this lets other tasks run, even if the kernel has taken all of it."""
RESERVED_DESCRIPTORS: Final = 64
"""Left for the engine's sockets, files and pipes, whatever the limit of connections is."""
ACCEPT_RETRY_S: Final = 0.1
LOG_INTERVAL_S: Final = 10.0
"""Each warning about connections is logged at most once in this time."""

_RECEIVE_BYTES: Final = 64 * 1024
_NO_ROOM: Final = (EMFILE, ENFILE, ENOBUFS, ENOMEM)
_NO_LISTENER: Final = (EBADF, EINVAL, ENOTSOCK, EOPNOTSUPP)
"""The socket cannot accept. All other errors are those of one connection, or pass."""

_HypercornApp = Callable[[Scope, Receive, Send, object, object], Awaitable[None]]


class Connections:
    """All connections of one server."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = _adapt(app)
        self._limit = _connection_limit(config.max_connections)
        self._config = Http1Config(max_body_bytes=config.max_body_bytes)
        self._context = WorkerContext(None)
        self._open: dict[trio.SocketStream, _Connection] = {}
        self._none_open = trio.Event()
        self._none_open.set()
        self._log_again_at: dict[str, float] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def accept(self, listener: trio.abc.Listener[trio.SocketStream], nursery: trio.Nursery) -> None:
        """Accept until cancelled, and serve in `nursery`. Connections over the limit are closed at once.

        Cancellation: of this task, closes the listener, and connections go on; of `nursery`, closes the connections
        and cancels their requests.
        """
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno is None or error.errno in _NO_LISTENER:
                        raise
                    self._warn_rarely("a connection could not be accepted (%s)", os.strerror(error.errno))
                    if error.errno in _NO_ROOM:
                        await trio.sleep(ACCEPT_RETRY_S)
                    continue
                if len(self._open) < self._limit:
                    nursery.start_soon(self._serve, self._add(stream))
                else:
                    stream.socket.close()
                    self._warn_rarely("%d connections are open; no more are taken", self._limit)

    async def close_idle(self) -> None:
        """Close connections that have no request now, and the others after their answer."""
        await self._context.terminated.set()
        for connection in self._open.values():
            connection.close_if_idle()

    async def wait_none_open(self) -> None:
        """Wait until there is no connection. Cancellation: safe."""
        while self._open:
            await self._none_open.wait()

    @property
    def num_unread(self) -> int:
        """Connections whose clients have not read what was written: the kernel takes no more of it."""
        return sum(connection.is_blocked for connection in self._open.values())

    @property
    def num_unanswered(self) -> int:
        """Connections with a request whose answer is not written yet, for no fault of the client."""
        return sum(not connection.is_blocked and connection.is_busy for connection in self._open.values())

    def close_by_force(self) -> None:
        """Close every connection, whatever it is doing. Synchronous: it works while the caller is cancelled."""
        for stream in self._open:
            stream.socket.close()

    def _add(self, stream: trio.SocketStream) -> _Connection:
        if not self._open:
            self._none_open = trio.Event()
        connection = _Connection(stream, self._app, self._config, self._context)
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
            if connection.stalled_client is not None:
                self._warn_rarely(
                    "the client at %s has read nothing for %g s; its connection is closed and its request ended",
                    connection.stalled_client,
                    SEND_STALL_S,
                )

    def _warn_rarely(self, message: str, *values: object) -> None:
        now_s = trio.current_time()
        if now_s >= self._log_again_at.get(message, -math.inf):
            self._log_again_at[message] = now_s + LOG_INTERVAL_S
            _logger.warning(message, *values)


class _Connection:
    """One connection: a task that reads, and one for each request, which the protocol starts."""

    def __init__(
        self,
        stream: trio.SocketStream,
        app: _HypercornApp,
        config: Http1Config,
        context: WorkerContext,
    ) -> None:
        self.stream = stream
        self.stalled_client: str | None = None
        """Address of the client, once the kernel has given up sending to it."""
        self._app = app
        self._config = config
        self._context = context
        self._protocol: Http1Protocol
        self._writing = trio.Lock()  # held only while a write waits for the kernel
        self._num_bytes_this_turn = 0
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
        try:
            async with TaskGroup() as tasks:
                self._protocol = Http1Protocol(
                    self._app,
                    self._config,
                    self._context,
                    tasks=tasks,
                    addresses=(addresses[0], addresses[1]),
                    send=self._carry_out,
                    write=self._write,
                )
                await self._read()
                inner.close()
                await self._protocol.handle(Closed())
        finally:
            del self._protocol  # it refers to this connection, and h11 to what it has read

    @property
    def is_blocked(self) -> bool:
        """A write waits for the client to read."""
        return self._writing.locked()

    @property
    def is_busy(self) -> bool:
        """There is a request whose answer is not over."""
        return self._read_until == math.inf

    def close_if_idle(self) -> None:
        """Close the connection, unless it has a request or one has just arrived."""
        if self._read_until < math.inf:
            self._set_read_until(-math.inf)

    # -------------------------------------------------------------------------------------- reading

    async def _read(self) -> None:
        """Feed the protocol until there is nothing more to read."""
        num_dropped = 0
        while num_dropped <= LINGER_BYTES:
            if self._has_next:
                self._has_next = False
                await self._protocol.resume()
                continue
            data = await self._receive()
            if self._is_lingering:
                num_dropped += len(data)
            elif data:
                await self._protocol.handle(RawData(data=data))
            if not data and not self._has_next:
                return

    async def _receive(self) -> bytes:
        """Bytes that have arrived; none if the client has closed, the time is over, or a pipelined request is here."""
        try:
            with trio.CancelScope(deadline=self._read_until) as self._receiving:
                return bytes(await self.stream.receive_some(_RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._note_stall(error)
        return b""

    # -------------------------------------------------------------------------------------- writing

    async def _carry_out(self, event: object) -> None:
        """Do what the protocol asks for. Called by the reader and by the tasks of requests."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            self._set_read_until(trio.current_time() + KEEP_ALIVE_S if event.idle else math.inf)
            if event.idle and self._protocol.has_next:
                self._has_next = True
                self._receiving.cancel(reason="a pipelined request is here")
        elif isinstance(event, Closed):
            await self._protocol.handle(Closed())
            self._close()

    async def _write(self, data: bytes) -> None:
        """Write all of `data`, behind what other tasks are writing. A closed connection takes anything.

        There is a schedule point only where the kernel takes less than everything, and one for each BYTES_PER_TURN:
        a task that streams has waited for what it sends, which is its schedule point.

        Cancellation: closes the connection. For the protocol all of `data` is sent, and some of it is missing.
        """
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._writing.locked():
                await self._writing.acquire()
                await self._send_holding_lock(data)
            elif rest := data[self._write_nowait(data) :]:
                self._writing.acquire_nowait()
                await self._send_holding_lock(rest)
            elif self._num_bytes_this_turn > BYTES_PER_TURN:
                self._num_bytes_this_turn = 0
                await trio.lowlevel.cancel_shielded_checkpoint()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            self._note_stall(error)
            await self._protocol.handle(Closed())
        except trio.Cancelled:
            self.stream.socket.close()
            raise

    def _write_nowait(self, data: bytes) -> int:
        """Write what the kernel takes now. Returns how many bytes that was."""
        self._num_bytes_this_turn += len(data)
        try:
            return os.write(self.stream.socket.fileno(), data) if data else 0
        except BlockingIOError:
            return 0

    async def _send_holding_lock(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        finally:
            self._writing.release()

    def _note_stall(self, error: Exception) -> None:
        """Remember whom the kernel has cut off: the listener's TCP_USER_TIMEOUT was over."""
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno == ETIMEDOUT:
            host, port = self._protocol.client
            self.stalled_client = f"{host}:{port}"

    # -------------------------------------------------------------------------------------- closing

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


def _adapt(app: ASGIApp) -> _HypercornApp:
    """`app` as Hypercorn calls it. Not a coroutine function: it would be one more frame to resume for each token."""

    def adapted(scope: Scope, receive: Receive, send: Send, sync_spawn: object, call_soon: object) -> Awaitable[None]:
        return app(scope, receive, send)

    return adapted


def _connection_limit(wanted: int) -> int:
    """As many as wanted, if this process may have so many descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, descriptors - RESERVED_DESCRIPTORS))
