"""Listeners: sockets that listen before anything else starts, with the options that accepted connections inherit.

Used by `serve` and by the command line.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

from trio_llm.config import ServerConfig
from trio_llm.errors import ConfigError

__all__ = ["AcceptTurns", "Listeners", "open_listeners"]

BACKLOG: Final = 2048
SEND_STALL_S: Final = 30.0
"""The kernel closes the connection of a client that takes no bytes for this long (TCP_USER_TIMEOUT)."""


class AcceptTurns(Protocol):
    """Lets processes that accept from the same sockets have about the same number of connections."""

    def publish(self, num_connections: int) -> None:
        """Let the others see how many connections this process has."""
        ...

    def is_ahead(self, num_connections: int) -> bool:
        """Whether another process has clearly fewer: it should be given the time to accept first."""
        ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that listen already, so that a port in use is found before anything else starts."""

    sockets: tuple[socket.socket, ...]
    turns: AcceptTurns | None = None
    """None: no other process accepts from them."""

    @property
    def urls(self) -> list[str]:
        """Addresses of the sockets, as URLs."""
        return [_url(one) for one in self.sockets]

    def close(self) -> None:
        """Stop listening. Not needed once `serve` has taken the sockets."""
        for one in self.sockets:
            one.close()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_listeners(config: ServerConfig) -> Listeners:
    """Listen on `config.host` and `config.port`. Clients can connect from now on; `serve` answers them.

    Raises:
        ConfigError: the port is in use or not allowed, or the host is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {config.host}: no such address ({error}); try 127.0.0.1") from None
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        _set_options(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from None
    return Listeners((listener,))


def _set_options(listener: socket.socket) -> None:
    """Set the options that accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_STALL_S * 1000))
    listener.setblocking(False)


def _bind_error(config: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port {config.port} is in use on {config.host}; stop what listens there, or choose another --port "
            "(0: any free one)"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {config.port} needs rights that this process does not have; use one above 1023")
    return ConfigError(f"--host {config.host} --port {config.port}: cannot listen there: {error.strerror}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
