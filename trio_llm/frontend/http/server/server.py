"""Host: Hypercorn under Trio for one app, from early sockets to a drained end.

Used by the command line and by Trio programs that serve a client beside their own tasks. `serve` installs no
signal handlers; `stop_on_signals` is for programs that want them.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import trio

from trio_llm.config import ServerConfig
from trio_llm.errors import ConfigError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.http.app import App, create_app
from trio_llm.frontend.http.server.connections import Connections
from trio_llm.frontend.http.watchdog import watch
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

__all__ = ["Listeners", "hard_exit_after", "open_listeners", "serve", "stop_on_signals"]

_logger = logging.getLogger(__name__)

BACKLOG = 2048
SEND_STALL_S = 30
"""A client that takes no bytes for so long is cut off, by the kernel: Hypercorn's sends cannot be cancelled."""
ENDING_S = 2.0
"""Time that aborted requests get, after the drain, to write their last event."""
CLOSING_S = 1.0
"""Time that connections get after that; then they are closed by force."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that listen already, so that a taken port is found before anything else starts."""

    sockets: tuple[socket.socket, ...]

    @property
    def urls(self) -> list[str]:
        """Where they listen."""
        return [_url(one) for one in self.sockets]

    def close(self) -> None:
        """Stop listening. Not needed once `serve` has taken them."""
        for one in self.sockets:
            one.close()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_listeners(config: ServerConfig) -> Listeners:
    """Listen on `config.host` and `config.port`. Clients can connect from now on, and wait for `serve`.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not one of this machine.
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


async def serve(
    client: EngineClient,
    config: ServerConfig,
    *,
    metrics: PrometheusStatLogger | None = None,
    listeners: Listeners | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `client` over HTTP until `stop` is set, then drain and return; without `stop`, for ever.

    Draining: `/health` says 503 and new work is refused at once; running requests get `drain_timeout_s`, then end
    with a proper last event, whose finish reason is `abort`. An engine's death stops the server too, five seconds
    later, unless `client.should_keep_api_server_alive`.

    Args:
        metrics: what /metrics shows; give the same one to the client's output handler. None: no such path.
        listeners: from `open_listeners`; None: opened here, closed here.
        task_status: started with the URLs once connections are accepted.

    Cancellation: stops at once. Connections are closed and their requests aborted, without last events.

    Raises:
        ConfigError: as `open_listeners`.
        EngineDeadError: the engine died, and this server has stopped therefore.
    """
    stop = trio.Event() if stop is None else stop
    with unwrap_single(), listeners or open_listeners(config) as taken:
        app = create_app(client, config, metrics)
        connections = Connections(app, config)
        async with trio.open_nursery() as nursery:
            try:
                accepting = await nursery.start(_accept, taken, connections, nursery)
                task_status.started(taken.urls)
                nursery.start_soon(watch, client, stop.set)
                await app.preload()
                await stop.wait()
                await _drain(client, app, config.drain_timeout_s)
                accepting.cancel(reason="the server has stopped")
                await connections.close_idle()
                with trio.move_on_after(CLOSING_S) as closing:
                    await connections.wait_none_open()
                if closing.cancelled_caught:
                    _logger.warning("some clients do not take their answers; their connections are closed by force")
            finally:
                nursery.cancel_scope.cancel(reason="the server has stopped")
                connections.close_by_force()
        if client.dead_error is not None and not client.should_keep_api_server_alive:
            raise client.dead_error


async def _accept(
    listeners: Listeners,
    connections: Connections,
    nursery: trio.Nursery,
    *,
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    """Accept until the scope that it starts with is cancelled; connections live on in `nursery`."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as accepting:
            for one in listeners.sockets:
                listener = trio.SocketListener(trio.socket.from_stdlib_socket(one))
                accepting.start_soon(connections.accept, listener, nursery)
            task_status.started(scope)


async def stop_on_signals(stop: trio.Event) -> None:
    """Set `stop` at SIGTERM, SIGINT or SIGHUP. At a second one, end the process at once, with the exit code 1.

    SIGHUP tells that the terminal is closed. It may come twice then, so a second one ends nothing; and where it is
    ignored already, it stays so: that is what `nohup` is for.

    Runs until cancelled; then signals do again what they did before.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with trio.open_signal_receiver(*numbers) as signals:
        async for number in signals:
            name = signal.Signals(number).name
            if not stop.is_set():
                _logger.info("%s: draining, so that running requests can end; a second signal stops at once", name)
                stop.set()
            elif number != signal.SIGHUP:
                _say(f"{name} again: ending at once")
                os._exit(1)


def _say(text: str) -> None:
    """Tell whoever reads the standard error, if anybody does: it may be closed, or its terminal gone."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def hard_exit_after(seconds: float) -> None:
    """Let the kernel end this process after `seconds`, whatever it hangs in. 0 takes that back.

    SIGALRM with its default action needs no thread and no interpreter: it works when Python code cannot run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


async def _drain(client: EngineClient, app: App, timeout_s: float) -> None:
    client.drain()
    with trio.move_on_after(timeout_s):
        await client.wait_idle()
    if count := app.abort_running():
        _logger.warning("%d requests were unfinished after %g s of draining and were ended", count, timeout_s)
    with trio.move_on_after(ENDING_S):
        await app.wait_idle()


def _set_options(listener: socket.socket) -> None:
    """What accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_STALL_S * 1000)
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
