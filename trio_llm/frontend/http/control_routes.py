"""Control routes: the paths that change a running engine. There only with `--dev-mode`. The paths are vLLM's.

Who can reach loopback can use them, web pages excepted.
Used by the routes, which put them into their router.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trio_llm.config import ServerConfig
from trio_llm.errors import InvalidRequestError, NotSupportedError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.json_body import parse_json_object
from trio_llm.frontend.http.server.errors import WebPageError
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send
from trio_llm.wire.messages import PlainValue

__all__ = ["MAX_ARGS", "control_routes"]

MAX_ARGS: Final = 64
"""Of a remote call."""

_SWITCHES: Final = {"true": True, "1": True, "false": False, "0": False}


def control_routes(client: EngineClient, config: ServerConfig) -> list[Route]:
    """The routes. What they raise is for the shell to answer."""
    control = _ControlRoutes(client, config)
    post, get = ["POST"], ["GET"]
    routes = [
        Route("/sleep", control.sleep, methods=post),
        Route("/wake_up", control.wake_up, methods=post),
        Route("/is_sleeping", control.is_sleeping, methods=get),
        Route("/pause", control.pause, methods=post),
        Route("/resume", control.resume, methods=post),
        Route("/is_paused", control.is_paused, methods=get),
        Route("/reset_prefix_cache", control.reset_prefix_cache, methods=post),
        Route("/collective_rpc", control.collective_rpc, methods=post),
        Route("/start_profile", control.start_profile, methods=post),
        Route("/stop_profile", control.stop_profile, methods=post),
        Route("/update_weights", control.update_weights, methods=post),
    ]
    for route in routes:
        route.app = _not_for_web_pages(route.app)
    return routes


def _not_for_web_pages(app: ASGIApp) -> ASGIApp:
    """Refuse what a browser sends for a web page: else any page that the operator looks at could reach loopback."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"origin" for name, _ in scope["headers"]):
            raise WebPageError
        await app(scope, receive, send)

    return guarded


class _ControlRoutes:
    """Each answers when the engine has done it. A client that leaves does not stop what has begun."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._weights_root = config.weights_root

    async def sleep(self, http: Request) -> Response:
        """POST /sleep?level=1."""
        level = _query(http, "level").get("level", "1")
        if level not in ("1", "2"):
            raise InvalidRequestError(f"level must be 1 or 2, not {level[:100]!r}", "level")
        await self._client.sleep(int(level))
        return _done()

    async def wake_up(self, http: Request) -> Response:
        """POST /wake_up?tags=weights&tags=kv_cache."""
        await self._client.wake_up(_query(http, "tags").getlist("tags") or None)
        return _done()

    async def is_sleeping(self, http: Request) -> Response:
        """GET /is_sleeping."""
        return _json({"is_sleeping": await self._client.is_sleeping()})

    async def pause(self, http: Request) -> Response:
        """POST /pause?mode=abort&clear_cache=true. With `wait` the answer comes when running requests are over."""
        query = _query(http, "mode", "clear_cache")
        mode, clears = query.get("mode", "abort"), query.get("clear_cache", "true").lower()
        if clears not in _SWITCHES:
            raise InvalidRequestError(f"clear_cache must be true or false, not {clears[:100]!r}", "clear_cache")
        await self._client.pause_generation(mode=mode, clear_cache=_SWITCHES[clears])
        return _done()

    async def resume(self, http: Request) -> Response:
        """POST /resume."""
        _query(http)
        await self._client.resume_generation()
        return _done()

    async def is_paused(self, http: Request) -> Response:
        """GET /is_paused."""
        return _json({"is_paused": await self._client.is_paused()})

    async def reset_prefix_cache(self, http: Request) -> Response:
        """POST /reset_prefix_cache."""
        _query(http)
        await self._client.reset_prefix_cache()
        return _done()

    async def collective_rpc(self, http: Request) -> Response:
        """POST /collective_rpc with `method`, `args` and `timeout`."""
        body = await _body(http, {"method", "args", "timeout"})
        method, args, timeout_s = body.get("method"), body.get("args"), body.get("timeout")
        args = [] if args is None else args
        if not isinstance(method, str):
            raise InvalidRequestError("method must be a string", "method")
        is_list = isinstance(args, list) and len(args) <= MAX_ARGS
        if not is_list or not all(isinstance(one, PlainValue) for one in args):
            raise InvalidRequestError(f"args must be a list of up to {MAX_ARGS} plain values", "args")
        if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)):
            raise InvalidRequestError("timeout must be a number of seconds", "timeout")
        return _json({"results": await self._client.collective_rpc(method, args, timeout_s=timeout_s)})

    async def start_profile(self, http: Request) -> Response:
        """POST /start_profile."""
        _query(http)
        await self._client.start_profile()
        return _done()

    async def stop_profile(self, http: Request) -> Response:
        """POST /stop_profile."""
        _query(http)
        return _json({"path": await self._client.stop_profile()})

    async def update_weights(self, http: Request) -> Response:
        """POST /update_weights with `path`, from `--weights-root`, and `version`."""
        body = await _body(http, {"path", "version"})
        path, version = body.get("path"), body.get("version")
        if not isinstance(path, str) or not isinstance(version, str):
            raise InvalidRequestError(
                "path and version must be strings", "version" if isinstance(path, str) else "path"
            )
        await self._client.update_weights(self._below_root(path), version=version)
        return _done()

    def _below_root(self, path: str) -> str:
        """The path with every link followed, which must not lead out of the root."""
        if self._weights_root is None:
            raise NotSupportedError("this server takes no weights; start it with --weights-root")
        root = Path(self._weights_root).resolve()
        try:
            found = (root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links (which is a RuntimeError), a NUL
            raise InvalidRequestError("path is not a path", "path") from error
        if not found.is_relative_to(root):
            raise InvalidRequestError("path leads out of --weights-root", "path")
        return str(found)


def _query(http: Request, *names: str) -> QueryParams:
    """The query, with no other names, and no body, as with `_body`: else a pause that was meant to keep would abort."""
    if http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers:
        raise InvalidRequestError("parameters of this path go into the query, not into a body")
    if strange := sorted(set(http.query_params) - set(names)):
        known = ", ".join(names) or "none"
        raise InvalidRequestError(
            f"there is no {strange[0][:100]!r} in the query here; there are {known}", strange[0][:100]
        )
    return http.query_params


async def _body(http: Request, fields: set[str]) -> dict[str, Any]:
    """An object with no other fields: what is misspelt here would do something else than what is meant."""
    body = parse_json_object(await http.body(), http.headers.get("content-type"))
    if strange := sorted(body.keys() - fields):
        known = ", ".join(sorted(fields))
        raise InvalidRequestError(f"there is no field {strange[0][:100]!r} here; there are {known}", strange[0][:100])
    return body


def _done() -> Response:
    return Response(status_code=200)


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
