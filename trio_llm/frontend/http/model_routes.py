"""Routes that describe the served model.

Used by the route table.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.frontend.http.openai.answer_bodies import ModelCard, ModelList
from trio_llm.frontend.http.request_reader import ApiContext

__all__ = ["list_models", "show_model"]


async def list_models(api: ApiContext, http: Request) -> Response:
    """GET /v1/models."""
    models: ModelList = {"object": "list", "data": [_card(api, name) for name in api.reader.model_names]}
    return _json(models)


async def show_model(api: ApiContext, http: Request) -> Response:
    """GET /v1/models/{name}."""
    return _json(_card(api, api.reader.model_name(http.path_params["name"])))


def _card(api: ApiContext, name: str) -> ModelCard:
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


def _json(value: ModelCard | ModelList) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
