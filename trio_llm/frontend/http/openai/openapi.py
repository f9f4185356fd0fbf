"""The OpenAPI document of this server.

Pure. Made once, from the request models, for /openapi.json.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from trio_llm.frontend.http.openai.chat import ChatRequest
from trio_llm.frontend.http.openai.completions import CompletionRequest
from trio_llm.frontend.http.openai.pooling import EmbeddingRequest, PoolingRequest, ScoreRequest

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
    """OpenAPI 3.1, as a tree that JSON can hold."""
    _, schemas = models_json_schema(
        [
            (model, "validation")
            for model in (ChatRequest, CompletionRequest, EmbeddingRequest, PoolingRequest, ScoreRequest)
        ],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "trio_llm", "version": version},
        "paths": {
            "/v1/chat/completions": {"post": _generating("Answer a conversation", "ChatRequest")},
            "/v1/completions": {"post": _generating("Continue one or several texts", "CompletionRequest")},
            "/v1/embeddings": {"post": _pooling("Embed one or several texts", "EmbeddingRequest")},
            "/pooling": {"post": _pooling("Embed or classify one or several texts", "PoolingRequest")},
            "/score": {"post": _pooling("Compare texts by their embeddings", "ScoreRequest")},
            "/v1/models": {"get": _reading("The names that are served")},
            "/v1/models/{name}": {
                "get": {
                    **_reading("One of them"),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/health": {"get": _reading("200 only if the engine answers now; 503 with its state otherwise")},
            "/readyz": {"get": _reading("As /health")},
            "/livez": {"get": _reading("200 unless the engine is dead for good")},
            "/startupz": {"get": _reading("200 once the model was loaded")},
            "/version": {"get": _reading("The version of this server")},
            "/metrics": {"get": _reading("Statistics for Prometheus", "text/plain")},
        },
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA}},
    }


def _pooling(summary: str, model: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": _body(model),
        "responses": {
            "200": {"description": "One entry for each, in order.", "content": {"application/json": {}}},
            "default": _error(),
        },
    }


def _body(model: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model}"}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _generating(summary: str, model: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": _body(model),
        "responses": {
            "200": {
                "description": "The answer; with stream, server-sent events that end with [DONE].",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            "default": _error(),
        },
    }


def _reading(summary: str, content_type: str = "application/json") -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {content_type: {}}}, "default": _error()},
    }


def _error() -> dict[str, Any]:
    return {
        "description": "What is wrong.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
