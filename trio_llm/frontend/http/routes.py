"""Routes as an ASGI app: finds the route of a request, and calls its handler after the prologue.

Loaded by the app when it is needed first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.frontend.http.request_reader import ApiContext, RequestReader
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute, ModelRoute, PlainRoute, ProbeRoute
from trio_llm.frontend.http.server.errors import MethodNotAllowedError, RouteNotFoundError, WebPageError
from trio_llm.frontend.http.server.shell import Receive, Scope, Send
from trio_llm.version import __version__

__all__ = ["create_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]

_NAME: Final = "{name}"


def create_routes(client: EngineClient, config: ServerConfig, running: RunningRequests) -> Routes:
    """The routes as one ASGI app for scopes of type `http`.

    Raises (when called): RouteNotFoundError, MethodNotAllowedError, and what the handlers raise. Nothing is caught
    here: the shell makes replies of errors.
    """
    api = ApiContext(client=client, config=config, running=running, reader=RequestReader(client, config))
    router = _Router()
    router.add("GET", "/openapi.json", _describing())
    for route in ROUTES:
        if not isinstance(route, ProbeRoute) and (config.dev_mode or not isinstance(route, ControlRoute)):
            router.add(route.method, route.path, _endpoint(api, route))

    return Routes(router)


class Routes:
    """The app that `create_routes` makes."""

    def __init__(self, router: _Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        response = await self._router.find(scope)(Request(scope, receive))
        await response(scope, receive, send)

    def find_template(self, path: str) -> str | None:
        """The path of the route that serves `path`, as in the route table. None: none does."""
        return self._router.find_template(path)


class _Router:
    """Finds an endpoint by path and method. Starlette's router would be five more calls around each answer."""

    def __init__(self) -> None:
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        """By path, then by method."""

    def add(self, method: str, path: str, endpoint: Endpoint) -> None:
        """Serve `path`. `{name}` at its end stands for the rest of a path, slashes included, as models' names have."""
        self._endpoints.setdefault(path, {})[method] = endpoint

    def find(self, scope: Scope) -> Endpoint:
        """The endpoint of a request. HEAD is GET: the server leaves the body out.

        Raises:
            RouteNotFoundError, MethodNotAllowedError: there is none.
        """
        path, method = scope["path"], scope["method"]
        by_method = self._endpoints.get(path) or self._find_open(path, scope)
        endpoint = by_method.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            allowed = ", ".join("GET, HEAD" if one == "GET" else one for one in sorted(by_method))
            raise MethodNotAllowedError(method, allowed)
        return endpoint

    def find_template(self, path: str) -> str | None:
        """The path that an endpoint was added with. None: no endpoint serves this one."""
        if path in self._endpoints:
            return path
        for known in self._endpoints:
            beginning = known.removesuffix(_NAME)
            if beginning != known and path.startswith(beginning) and path != beginning:
                return known
        return None

    def _find_open(self, path: str, scope: Scope) -> Mapping[str, Endpoint]:
        template = self.find_template(path)
        if template is None:
            raise RouteNotFoundError(path)
        scope["path_params"] = {"name": path.removeprefix(template.removesuffix(_NAME))}
        return self._endpoints[template]


def _endpoint(api: ApiContext, route: ModelRoute[Any] | PlainRoute) -> Endpoint:
    if isinstance(route, ModelRoute):
        return partial(_ask_model, api, route)
    if isinstance(route, ControlRoute):
        return partial(_control, api, route)
    return partial(route.handler, api)


async def _ask_model(api: ApiContext, route: ModelRoute[Any], http: Request) -> Response:
    return await route.handler(api, await api.reader.begin(http, route.body, route.task))


async def _control(api: ApiContext, route: ControlRoute, http: Request) -> Response:
    """Refuse what a browser sends for a web page: otherwise any page that the operator opens could reach loopback."""
    if "origin" in http.headers:
        raise WebPageError("Origin")
    # Browsers send no Origin with some requests, such as a form without referrer; this they always do. `none` is the
    # operator's own doing, and no page of ours could be `same-origin`.
    if http.headers.get("sec-fetch-site", "none").strip().lower() != "none":
        raise WebPageError("Sec-Fetch-Site")
    return await route.handler(api, http)


def _describing() -> Endpoint:
    """GET /openapi.json. The document is made when it is asked for first."""
    document: list[bytes] = []

    async def describe(http: Request) -> Response:
        if not document:
            document.append(msgspec.json.encode(openapi_document(__version__)))
        return Response(document[0], media_type="application/json")

    return describe
