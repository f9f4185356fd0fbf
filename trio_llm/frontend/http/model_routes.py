"""Routes that describe the server: its models, and the OpenAPI document.

Used by the route table.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.frontend.http.request_reader import ApiContext
from trio_llm.frontend.http.server.errors import RouteNotFoundError

__all__ = ["list_models", "show_model"]


async def list_models(api: ApiContext, http: Request) -> Response:
    """GET /v1/models."""
    cards = [_card(api, name) for name in api.reader.model_names]
    return _json({"object": "list", "data": cards})


async def show_model(api: ApiContext, http: Request) -> Response:
    """GET /v1/models/{name}."""
    name = http.path_params["name"]
    if not name:
        raise RouteNotFoundError(http.scope["path"])
    return _json(_card(api, api.reader.model_name(name)))


def _card(api: ApiContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": api.created,
        "owned_by": "trio_llm",
        "root": name,
        "parent": None,
        "max_model_len": api.client.model_config.max_model_len,
        "permission": [],
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
