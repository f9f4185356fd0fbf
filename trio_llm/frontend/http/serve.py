"""serve: a client over HTTP, from sockets that listen to a drained end.

Used by the command line and by Trio programs that serve a client beside their own tasks. Installs no signal handlers.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.http.app import App, create_app
from trio_llm.frontend.http.server.connections import Connections
from trio_llm.frontend.http.server.listeners import Listeners, open_listeners
from trio_llm.frontend.http.server.polite_listener import PoliteListener
from trio_llm.frontend.http.watchdog import watch
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

__all__ = ["serve"]

_logger = logging.getLogger(__name__)

ENDING_S: Final = 2.0
"""How long aborted requests may take, after the drain, to write their last event."""
CLOSING_S: Final = 1.0
"""How long connections may take after that; then they are closed by force."""


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

    Draining: `/health` is 503, new work is refused, also work whose body is not whole, and idle connections are closed,
    all at once. Running requests get
    `drain_timeout_s`; then they end with a proper last event, whose finish reason is `abort`. The death of the engine
    stops the server too, five seconds later, unless `client.should_keep_api_server_alive`.

    Args:
        metrics: what /metrics shows; give the same one to the client's output handler. None: there is no such path.
        listeners: from `open_listeners`; None: opened and closed here.
        task_status: started with the URLs once connections are accepted.

    Cancellation: stops at once. Connections are closed and their requests aborted, without last events.

    Raises:
        ConfigError: as `open_listeners`.
        EngineDeadError: the engine died, which has stopped this server.
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
                client.drain()
                app.stop_reading()
                await connections.close_idle()
                await _finish_requests(client, app, config.drain_timeout_s)
                accepting.cancel(reason="the server has stopped")
                await connections.close_idle()  # those that were accepted meanwhile
                with trio.move_on_after(CLOSING_S) as closing:
                    await connections.wait_none_open()
                if closing.cancelled_caught:
                    _warn_of_unfinished(connections)
            finally:
                nursery.cancel_scope.cancel(reason="the server has stopped")
                connections.close_by_force()
        if client.dead_error is not None and not client.should_keep_api_server_alive:
            raise client.dead_error


def _warn_of_unfinished(connections: Connections) -> None:
    if num_unread := connections.num_unread:
        _logger.warning("%d clients do not read their answers; their connections are closed by force", num_unread)
    if num_unanswered := connections.num_unanswered:
        _logger.warning("%d requests have no answer yet; their connections are closed by force", num_unanswered)


async def _accept(
    listeners: Listeners,
    connections: Connections,
    nursery: trio.Nursery,
    *,
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    """Accept until the scope that `task_status` gets is cancelled; connections live on in `nursery`."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as accepting:
            for one in listeners.sockets:
                listener: trio.abc.Listener[trio.SocketStream]
                listener = plain = trio.SocketListener(trio.socket.from_stdlib_socket(one))
                if listeners.turns is not None:
                    listener = PoliteListener(plain, listeners.turns, lambda: connections.num_open)
                accepting.start_soon(connections.accept, listener, nursery)
            task_status.started(scope)


async def _finish_requests(client: EngineClient, app: App, timeout_s: float) -> None:
    with trio.move_on_after(timeout_s):
        await client.wait_idle()
    if count := app.abort_running():
        _logger.warning("%d requests were unfinished after %g s of draining and were ended", count, timeout_s)
    with trio.move_on_after(ENDING_S):
        await app.wait_idle()
