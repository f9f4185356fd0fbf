"""Routes as an ASGI app: a router over the table of routes, with the prologue that all requests to the model share.

Loaded by the app when it is needed first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import starlette.routing
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.frontend.http.request_reader import ApiContext, RequestReader
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute, ModelRoute, PlainRoute, ProbeRoute
from trio_llm.frontend.http.server.errors import MethodNotAllowedError, RouteNotFoundError, WebPageError
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send
from trio_llm.version import __version__

__all__ = ["create_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]


def create_routes(client: EngineClient, config: ServerConfig, running: RunningRequests) -> ASGIApp:
    """The routes as one ASGI app for scopes of type `http`.

    Raises (when called): RouteNotFoundError, MethodNotAllowedError, and what the handlers raise. Nothing is caught
    here: the shell makes replies of errors.
    """
    api = ApiContext(client=client, config=config, running=running, reader=RequestReader(client, config))
    routes = [
        _route(route.path, route.method, _endpoint(api, route))
        for route in ROUTES
        if not isinstance(route, ProbeRoute) and (config.dev_mode or not isinstance(route, ControlRoute))
    ]
    routes.append(_route("/openapi.json", "GET", _describing()))
    router = starlette.routing.Router(routes, redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app  # makes the router raise its 404 and 405 rather than write texts
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 404:
                raise RouteNotFoundError(scope["path"]) from None
            if error.status_code == 405:
                allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
                raise MethodNotAllowedError(scope["method"], allow) from None
            raise

    return app


def _route(path: str, method: str, endpoint: Endpoint) -> starlette.routing.Route:
    # The last part of a path may have slashes in it: names of models do.
    return starlette.routing.Route(path.replace("{name}", "{name:path}"), endpoint, methods=[method])


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
        raise WebPageError
    return await route.handler(api, http)


def _describing() -> Endpoint:
    """GET /openapi.json. The document is made when it is asked for first."""
    document: list[bytes] = []

    async def describe(http: Request) -> Response:
        if not document:
            document.append(msgspec.json.encode(openapi_document(__version__)))
        return Response(document[0], media_type="application/json")

    return describe
