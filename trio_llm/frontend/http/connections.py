"""Connections: Hypercorn's HTTP over accepted sockets.

Used by the host, in place of Hypercorn's own `serve`, for two reasons. An error inside one connection ends that
connection and not the server. And connections can be closed by force: Hypercorn's sends cannot be cancelled, so that
a client that reads nothing would hold up the end for as long as the kernel waits for it.
"""

from __future__ import annotations

import logging
import sys

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from trio_llm.frontend.http.shell import ASGIApp

__all__ = ["Connections"]

_logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""An idle connection is kept for so long: longer than load balancers keep theirs."""


class Connections:
    """All connections of one server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = ASGIWrapper(app)
        self._config = _hypercorn_config()
        self._context = WorkerContext(None)
        self._open: set[trio.SocketStream] = set()
        self._none_open = trio.Event()
        self._none_open.set()

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end.

        Cancellation: the connection is closed and its request cancelled, as soon as no send is under way.
        """
        if not self._open:
            self._none_open = trio.Event()
        self._open.add(stream)
        try:
            await TCPServer(self._app, self._config, self._context, ConnectionState({}), stream)
        except Exception:
            _logger.exception("a connection failed")
        finally:
            self._open.discard(stream)
            if not self._open:
                self._none_open.set()

    async def close_idle(self) -> None:
        """Close connections without a request now, and the others after their answer."""
        await self._context.terminated.set()

    async def wait_none_open(self) -> None:
        """Wait until there is no connection. Cancellation: safe."""
        while self._open:
            await self._none_open.wait()

    def close_by_force(self) -> None:
        """Close every connection, whatever it is doing. Synchronous: it works while the caller is cancelled."""
        for stream in self._open:
            stream.socket.close()


def _hypercorn_config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("trio_llm.hypercorn")
    config.loglevel = "WARNING"
    config.include_server_header = False
    config.include_date_header = False
    config.keep_alive_max_requests = sys.maxsize
    config.keep_alive_timeout = KEEP_ALIVE_S
    # A limit on receiving would cut streams: their clients send nothing while they read.
    config.read_timeout = None
    return config
