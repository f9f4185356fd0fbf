"""The OpenAPI document of this server, made from the table of routes.

Pure. Made once, for /openapi.json.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from trio_llm.frontend.http.route_table import ROUTES, ControlRoute, ModelRoute, ProbeRoute, Route

__all__ = ["openapi_document"]

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1, as a tree that JSON can hold. Control routes are not in it."""
    _, schemas = models_json_schema(
        [(route.body, "validation") for route in ROUTES if isinstance(route, ModelRoute)],
        ref_template="#/components/schemas/{model}",
    )
    paths = {
        route.path: {route.method.lower(): _operation(route)} for route in ROUTES if not isinstance(route, ControlRoute)
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "trio_llm", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA}},
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary}
    if "{name}" in route.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if isinstance(route, ModelRoute):
        operation["requestBody"] = {"required": True, "content": _content(route.body.__name__)}
    operation["responses"] = {
        "200": _success(route),
        "default": {"description": "What is wrong.", "content": _content("Error")},
    }
    return operation


def _success(route: Route) -> dict[str, Any]:
    if isinstance(route, ModelRoute) and route.streams:
        return {
            "description": "The answer; with stream, server-sent events that end with [DONE].",
            "content": {"application/json": {}, "text/event-stream": {}},
        }
    if isinstance(route, ModelRoute):
        return {"description": "One entry for each, in order.", "content": {"application/json": {}}}
    media_type = route.media_type if isinstance(route, ProbeRoute) else "application/json"
    return {"description": route.summary, "content": {media_type: {}}}


def _content(name: str) -> dict[str, Any]:
    """JSON that a schema of this document describes."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
