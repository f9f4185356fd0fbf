"""Sockets that listen: ports in use, hosts that are not ours, and options of accepted connections."""

from __future__ import annotations

import socket

import pytest

from trio_llm.config import ServerConfig
from trio_llm.errors import ConfigError
from trio_llm.frontend.http.server.listeners import open_listeners


def test_a_port_that_is_in_use_is_an_error_that_names_the_flag() -> None:
    with open_listeners(ServerConfig(port=0)) as taken:
        port = taken.sockets[0].getsockname()[1]

        with pytest.raises(ConfigError, match=rf"--port {port} is in use on 127\.0\.0\.1"):
            open_listeners(ServerConfig(port=port))


def test_a_port_is_free_again_after_closing() -> None:
    with open_listeners(ServerConfig(port=0)) as listeners:
        port = listeners.sockets[0].getsockname()[1]

    open_listeners(ServerConfig(port=port)).close()


@pytest.mark.parametrize("name", ["no-such-server.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_an_error_that_names_the_flag(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {name}"):
        open_listeners(ServerConfig(host=name, port=0, allow_unauthenticated=True))


def test_accepted_connections_inherit_a_limit_for_clients_that_do_not_read() -> None:
    with open_listeners(ServerConfig(port=0)) as listeners:
        [listener] = listeners.sockets
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
