"""The ASGI application: the shell, probes that answer at once, and the routes, which are loaded when needed.

Starlette and pydantic take a third of a second to import. `/health`, `/version` and `/metrics` need neither, so that
a server answers its first probe while they are still being loaded, in a thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import trio

from trio_llm.config import ServerConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.server.errors import MethodNotAllowedError
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send, Shell
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.version import __version__

__all__ = ["App", "create_app"]

HEALTH_S = 5.0
"""A round trip through the engine's loop that takes longer, or half of `--stall-timeout`, counts as a stall."""
LOADING_RETRY_S = 2
DEAD_RETRY_S = 30


@dataclass(frozen=True, slots=True)
class _Answer:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class App:
    """The application of one server. Callable as ASGI."""

    def __init__(self, client: EngineClient, config: ServerConfig, metrics: PrometheusStatLogger | None) -> None:
        self._client = client
        self._config = config
        self._running = RunningRequests()
        self._routes: ASGIApp | None = None
        self._loading = trio.Lock()
        self._shell = Shell(self._dispatch, config, is_draining=lambda: client.status.state == "draining")
        self._probes: dict[str, Callable[[Scope], Awaitable[_Answer]]] = {
            "/health": self._health,
            "/readyz": self._health,
            "/livez": self._livez,
            "/startupz": self._startupz,
            "/version": self._version,
        }
        if metrics is not None:
            self._probes["/metrics"] = self._probes["/metrics/"] = partial(_render_metrics, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope. Cancellation: as `Shell`."""
        await self._shell(scope, receive, send)

    async def preload(self) -> None:
        """Load the routes now, so that the first request does not wait for them.

        Cancellation: safe; loading goes on in its thread, and a later call takes what it has loaded.
        """
        await self._load_routes()

    def abort_running(self) -> int:
        """End every generation: its reader gets a proper last event with the reason `abort`. Returns how many."""
        return self._client.abort(self._running.ids())

    async def wait_idle(self) -> None:
        """Wait until no request is being answered. Cancellation: safe."""
        await self._shell.wait_idle()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        probe = self._probes.get(scope["path"])
        if probe is None:
            routes = self._routes or await self._load_routes()
            await routes(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowedError(scope["method"], "GET, HEAD")
        answer = await probe(scope)
        headers = [
            (b"content-type", answer.content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(answer.body)),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _load_routes(self) -> ASGIApp:
        async with self._loading:
            if self._routes is None:
                module = await trio.to_thread.run_sync(
                    importlib.import_module, "trio_llm.frontend.http.routes", abandon_on_cancel=True
                )
                self._routes = module.create_routes(self._client, self._config, self._running)
            return self._routes

    # --------------------------------------------------------------------------------------- probes

    async def _health(self, scope: Scope) -> _Answer:
        """200 only if the engine has just answered."""
        status = self._client.status
        if status.state != "ready":
            return _not_ready(status, status.state, status.reason)
        limit_s = min(HEALTH_S, self._client.config.stall_timeout_s / 2)
        try:
            with trio.fail_after(limit_s):
                await self._client.check_health()
        except trio.TooSlowError:
            status = self._client.status
            if status.state != "ready":  # it died, or was sent to sleep, while it was asked
                return _not_ready(status, status.state, status.reason)
            return _not_ready(status, "stalled", f"the engine's loop did not answer within {limit_s:g} s")
        except EngineUnavailableError as error:
            status = self._client.status
            return _not_ready(status, "loading" if status.state == "ready" else status.state, str(error))
        except EngineDeadError as error:
            return _not_ready(self._client.status, "dead", str(error))
        return _Answer(msgspec.json.encode({"status": "ready"}))

    async def _livez(self, scope: Scope) -> _Answer:
        """200 unless only another process could help."""
        await trio.lowlevel.checkpoint()
        status = self._client.status
        return _not_ready(status, "dead", status.reason) if status.state == "dead" else _alive()

    async def _startupz(self, scope: Scope) -> _Answer:
        """200 once the engine was ready."""
        await trio.lowlevel.checkpoint()
        status = self._client.status
        return _not_ready(status, status.state, status.reason) if status.state in ("loading", "dead") else _alive()

    async def _version(self, scope: Scope) -> _Answer:
        await trio.lowlevel.checkpoint()
        return _Answer(msgspec.json.encode({"version": __version__}))


def create_app(client: EngineClient, config: ServerConfig, metrics: PrometheusStatLogger | None = None) -> App:
    """The ASGI application that serves `client`. It owns no tasks: whoever runs it runs `preload`, too.

    Args:
        metrics: what /metrics shows; without it there is no such path.
    """
    return App(client, config, metrics)


async def _render_metrics(metrics: PrometheusStatLogger, scope: Scope) -> _Answer:
    await trio.lowlevel.checkpoint()
    accept = next((str(value, "latin-1") for name, value in scope["headers"] if name == b"accept"), "")
    body, content_type = metrics.render(accept)
    return _Answer(body, content_type=content_type)


def _alive() -> _Answer:
    return _Answer(msgspec.json.encode({"status": "alive"}))


def _not_ready(status: EngineStatus, state: str, reason: str | None) -> _Answer:
    body = {
        "status": state,
        "phase": status.phase,
        "done": status.done,
        "total": status.total,
        "elapsed_s": round(status.elapsed_s, 3),
        "reason": reason,
    }
    retry_s = DEAD_RETRY_S if state == "dead" else LOADING_RETRY_S
    return _Answer(msgspec.json.encode(body), 503, headers=[(b"retry-after", b"%d" % retry_s)])
