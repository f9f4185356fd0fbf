"""App: the ASGI application. It joins the shell, probes that answer at once, and routes that are loaded when needed.

Starlette and pydantic take a third of a second to import. `/health`, `/version` and `/metrics` need neither, so a
server answers its first probe while a thread still loads them. Used by `serve`.
"""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, cast

import msgspec
import trio

from trio_llm.config import ServerConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.server.errors import MethodNotAllowedError
from trio_llm.frontend.http.server.instrument import HttpExchange
from trio_llm.frontend.http.server.shell import Receive, Scope, Send, Shell
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.version import __version__

__all__ = ["App", "create_app"]

HEALTH_S: Final = 1.5
"""How long `client.check_health()` may take, or half of `--stall-timeout`. Probes often wait two seconds."""
LOADING_RETRY_S: Final = 2
DEAD_RETRY_S: Final = 30


@dataclass(frozen=True, slots=True)
class _Answer:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class RoutesApp(Protocol):
    """What `create_routes` makes."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    def find_template(self, path: str) -> str | None:
        """The path of the route that serves `path`, as in the route table. None: none does."""
        ...


_Probe = Callable[[Scope], Awaitable[_Answer]]


class App:
    """The application of one server. Callable as ASGI."""

    def __init__(self, client: EngineClient, config: ServerConfig, metrics: PrometheusStatLogger | None) -> None:
        self._client = client
        self._config = config
        self._metrics = metrics
        self._running = RunningRequests()
        self._routes: RoutesApp | None = None
        self._loading = trio.Lock()
        self._shell = Shell(
            self._dispatch,
            config,
            is_draining=lambda: client.status.state == "draining",
            observe=None if metrics is None else self._count_exchange,
        )
        self._probes: dict[str, _Probe] = {
            "/health": self._health,
            "/readyz": self._health,
            "/livez": self._livez,
            "/startupz": self._startupz,
            "/version": self._version,
        }
        if metrics is not None:
            self._probes["/metrics"] = self._probes["/metrics/"] = partial(_render_metrics, metrics)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI scope. Cancellation: as `Shell`."""
        return self._shell(scope, receive, send)

    async def preload(self) -> None:
        """Load the routes now, so that the first request does not wait for them.

        Cancellation: safe; loading goes on in its thread, and a later call takes what was loaded.
        """
        await self._load_routes()

    def abort_running(self) -> int:
        """End every generation: its client gets a proper last event with the reason `abort`. Returns their number."""
        return self._running.end_all(self._client)

    def stop_reading(self) -> None:
        """The server stops: requests whose bodies are not whole get 503. Synchronous."""
        self._shell.stop_reading()

    async def wait_idle(self) -> None:
        """Wait until no request is being answered. Cancellation: safe."""
        await self._shell.wait_idle()

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        probe = self._probes.get(scope["path"])
        if probe is not None:
            return _answer(probe, scope, send)
        if self._routes is not None:
            return self._routes(scope, receive, send)
        return self._load_and_serve(scope, receive, send)

    async def _load_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        routes = await self._load_routes()
        await routes(scope, receive, send)

    def _count_exchange(self, exchange: HttpExchange) -> None:
        """Count a request that is over, unless it was a probe's. Paths without a route are one handler, `none`."""
        path = exchange.path
        if path in self._probes or self._metrics is None:
            return
        self._metrics.record_http(
            handler=(None if self._routes is None else self._routes.find_template(path)) or "none",
            method=exchange.method,
            status=exchange.status,
            seconds=exchange.seconds,
            request_bytes=exchange.request_bytes,
            response_bytes=exchange.response_bytes,
        )

    async def _load_routes(self) -> RoutesApp:
        async with self._loading:
            if self._routes is None:
                module = await trio.to_thread.run_sync(
                    importlib.import_module, "trio_llm.frontend.http.routes", abandon_on_cancel=True
                )
                self._routes = cast(RoutesApp, module.create_routes(self._client, self._config, self._running))
            return self._routes

    # --------------------------------------------------------------------------------------- probes

    async def _health(self, scope: Scope) -> _Answer:
        """200 if `client.check_health()` finds the engine well in time, be it idle or busy."""
        status = self._client.status
        if status.state != "ready":
            return _not_ready(status, status.state, status.reason)
        limit_s = min(HEALTH_S, self._client.config.stall_timeout_s / 2)
        try:
            with trio.fail_after(limit_s):
                await self._client.check_health()
        except trio.TooSlowError:
            status = self._client.status
            if status.state != "ready":  # it died, or was sent to sleep, meanwhile
                return _not_ready(status, status.state, status.reason)
            return _not_ready(status, "stalled", f"the engine gave no sign of life within {limit_s:g} s")
        except EngineUnavailableError as error:
            status = self._client.status
            return _not_ready(status, "loading" if status.state == "ready" else status.state, str(error))
        except EngineDeadError as error:
            return _not_ready(self._client.status, "dead", str(error))
        return _Answer(msgspec.json.encode({"status": "ready"}))

    async def _livez(self, scope: Scope) -> _Answer:
        """200 unless the engine is dead for good, which only a new process mends."""
        await trio.lowlevel.checkpoint()
        status = self._client.status
        return _not_ready(status, "dead", status.reason) if status.state == "dead" else _alive()

    async def _startupz(self, scope: Scope) -> _Answer:
        """200 once the engine has been ready."""
        await trio.lowlevel.checkpoint()
        status = self._client.status
        return _not_ready(status, status.state, status.reason) if status.state in ("loading", "dead") else _alive()

    async def _version(self, scope: Scope) -> _Answer:
        await trio.lowlevel.checkpoint()
        return _Answer(msgspec.json.encode({"version": __version__}))


def create_app(client: EngineClient, config: ServerConfig, metrics: PrometheusStatLogger | None = None) -> App:
    """Make the ASGI application that serves `client`. It has no tasks of its own: its user also runs `preload`.

    Args:
        metrics: what /metrics shows; None: there is no such path.
    """
    return App(client, config, metrics)


async def _render_metrics(metrics: PrometheusStatLogger, scope: Scope) -> _Answer:
    await trio.lowlevel.checkpoint()
    accept = next((str(value, "latin-1") for name, value in scope["headers"] if name == b"accept"), "")
    body, content_type = metrics.render(accept, others=await metrics.collect_others())
    headers = [(b"vary", b"accept, accept-encoding")]
    if _takes_gzip(scope):
        body = gzip.compress(body, compresslevel=1)
        headers.append((b"content-encoding", b"gzip"))
    return _Answer(body, content_type=content_type, headers=headers)


def _takes_gzip(scope: Scope) -> bool:
    """Prometheus asks for it, and series are a tenth of their size then."""
    codings = [str(value, "latin-1").lower() for name, value in scope["headers"] if name == b"accept-encoding"]
    for coding in ",".join(codings).split(","):
        name, _, weight = coding.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _answer(probe: _Probe, scope: Scope, send: Send) -> None:
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
