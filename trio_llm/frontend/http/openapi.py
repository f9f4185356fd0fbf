"""The OpenAPI document of this server, made from the table of routes.

Pure. Made once, for /openapi.json.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic.json_schema import models_json_schema

from trio_llm.frontend.http.openai.answer_bodies import Error
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute, ModelRoute, ProbeRoute, Route

__all__ = ["openapi_document"]

_REFERENCE: Final = "#/components/schemas/"


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1, as a tree that JSON can hold. Control routes are not in it."""
    routes = [route for route in ROUTES if not isinstance(route, ControlRoute)]
    _, requests = models_json_schema(
        [(route.body, "validation") for route in routes if isinstance(route, ModelRoute)],
        ref_template=_REFERENCE + "{model}",
    )
    types = dict.fromkeys(kind for route in routes for kind in _answer_types(route))
    _, answers = msgspec.json.schema_components([*types, Error], ref_template=_REFERENCE + "{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "trio_llm", "version": version},
        "paths": {route.path: {route.method.lower(): _operation(route)} for route in routes},
        "components": {"schemas": {**requests["$defs"], **answers}},
    }


def _answer_types(route: Route) -> list[Any]:
    kinds = [route.answer]
    if isinstance(route, ModelRoute):
        kinds.append(route.chunk)
    if isinstance(route, ProbeRoute):
        kinds.append(route.failure)
    return [kind for kind in kinds if kind is not None]


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary}
    if "{name}" in route.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if isinstance(route, ModelRoute):
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    operation["responses"] = {
        "200": _success(route),
        "default": {"description": "What is wrong.", "content": _json(Error)},
    }
    if isinstance(route, ProbeRoute) and route.failure is not None:
        operation["responses"]["503"] = {"description": "The state of the engine.", "content": _json(route.failure)}
    return operation


def _success(route: Route) -> dict[str, Any]:
    if isinstance(route, ModelRoute) and route.chunk is not None:
        events = {
            "schema": {"type": "string", "description": "Server-sent events. The data of the last one is [DONE]."},
            "x-event-data-schema": {"$ref": _REFERENCE + route.chunk.__name__},
        }
        return {"description": "The answer.", "content": {**_json(route.answer), "text/event-stream": events}}
    if route.answer is None:
        return {"description": route.summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"description": route.summary, "content": _json(route.answer)}


def _json(kind: type) -> dict[str, Any]:
    """JSON of a type that has a schema in this document."""
    return {"application/json": {"schema": {"$ref": _REFERENCE + kind.__name__}}}
