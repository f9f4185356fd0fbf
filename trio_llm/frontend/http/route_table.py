"""ROUTES: the paths of the server, with what each takes and gives, in one table.

The router, the OpenAPI document and the tests of the pages are made from it. The probes are in it too, without a
handler: the app answers them before this module is loaded. `/openapi.json`, which describes the table, is not in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from trio_llm.frontend.http import control_routes as control
from trio_llm.frontend.http import generating_routes as generating
from trio_llm.frontend.http import model_routes as models
from trio_llm.frontend.http import pooling_routes as pooling
from trio_llm.frontend.http.openai import answer_bodies as bodies
from trio_llm.frontend.http.openai.body import ModelRequest
from trio_llm.frontend.http.openai.chat import ChatRequest
from trio_llm.frontend.http.openai.completions import CompletionRequest
from trio_llm.frontend.http.openai.pooling import EmbeddingRequest, PoolingRequest, ScoreRequest
from trio_llm.frontend.http.request_reader import ApiContext, Call

__all__ = ["ROUTES", "ControlRoute", "ModelRoute", "PlainRoute", "ProbeRoute", "Route"]

Asked = TypeVar("Asked", bound=ModelRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoute(Generic[Asked]):
    """A POST that asks the model for something. Its request is read before the handler is called."""

    path: str
    summary: str
    handler: Callable[[ApiContext, Call[Asked]], Awaitable[Response]]
    body: type[Asked]
    answer: Any
    """The type of a whole answer: one of `answer_bodies`."""
    chunk: Any = None
    """The type of an event's data in a stream. None: this route does not stream."""
    task: str | None = None
    """What the served model must be able to do. None: the handler checks that."""
    method: Literal["POST"] = "POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRoute:
    """A path whose handler reads the request itself."""

    path: str
    summary: str
    handler: Callable[[ApiContext, Request], Awaitable[Response]]
    method: Literal["GET", "POST"] = "GET"
    answer: Any = None
    """None: no JSON, or not documented for programs."""


class ControlRoute(PlainRoute):
    """It changes or watches the engine: there only with `--dev-mode`, and not for web pages."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRoute:
    """A GET that the app answers at once, also while the model loads."""

    path: str
    summary: str
    answer: Any
    """The type of an answer with the status 200. None: text for Prometheus."""
    failure: Any = None
    """The type of an answer with the status 503, if it has one of its own."""
    method: Literal["GET"] = "GET"


Route = ModelRoute[Any] | PlainRoute | ProbeRoute


def _probe(path: str, summary: str) -> ProbeRoute:
    return ProbeRoute(path=path, summary=summary, answer=bodies.ProbePassed, failure=bodies.ProbeFailed)


ROUTES: Final[tuple[Route, ...]] = (
    ModelRoute(
        path="/v1/chat/completions",
        summary="Answer a conversation",
        handler=generating.chat,
        body=ChatRequest,
        answer=bodies.ChatCompletion,
        chunk=bodies.ChatChunk,
        task="generate",
    ),
    ModelRoute(
        path="/v1/completions",
        summary="Continue one or several texts",
        handler=generating.complete,
        body=CompletionRequest,
        answer=bodies.Completion,
        chunk=bodies.CompletionChunk,
        task="generate",
    ),
    ModelRoute(
        path="/v1/embeddings",
        summary="Embed one or several texts",
        handler=pooling.embed,
        body=EmbeddingRequest,
        answer=bodies.EmbeddingList,
        task="embed",
    ),
    ModelRoute(
        path="/pooling",
        summary="Embed or classify one or several texts",
        handler=pooling.pool,
        body=PoolingRequest,
        answer=bodies.PoolingList,
    ),
    ModelRoute(
        path="/score",
        summary="Compare texts by their embeddings",
        handler=pooling.score,
        body=ScoreRequest,
        answer=bodies.ScoreList,
        task="score",
    ),
    PlainRoute(
        path="/v1/models", summary="The names that are served", handler=models.list_models, answer=bodies.ModelList
    ),
    PlainRoute(path="/v1/models/{name}", summary="One of them", handler=models.show_model, answer=bodies.ModelCard),
    _probe("/health", "200 only if the engine answers now; 503 with its state otherwise"),
    _probe("/readyz", "As /health"),
    _probe("/livez", "200 unless the engine is dead for good"),
    _probe("/startupz", "200 once the model was loaded"),
    ProbeRoute(path="/version", summary="The version of this server", answer=bodies.Version),
    ProbeRoute(path="/metrics", summary="Statistics for Prometheus", answer=None),
    ControlRoute(method="POST", path="/sleep", handler=control.sleep, summary="Give the engine's memory back"),
    ControlRoute(method="POST", path="/wake_up", handler=control.wake_up, summary="Undo /sleep"),
    ControlRoute(method="GET", path="/is_sleeping", handler=control.show_sleeping, summary="Is any part asleep"),
    ControlRoute(method="POST", path="/pause", handler=control.pause, summary="Stop generating"),
    ControlRoute(method="POST", path="/resume", handler=control.resume, summary="Undo /pause"),
    ControlRoute(method="GET", path="/is_paused", handler=control.show_paused, summary="Whether generating is stopped"),
    ControlRoute(
        method="POST",
        path="/reset_prefix_cache",
        handler=control.reset_prefix_cache,
        summary="Forget what was computed before",
    ),
    ControlRoute(
        method="POST", path="/collective_rpc", handler=control.collective_rpc, summary="Call a method of every worker"
    ),
    ControlRoute(
        method="POST", path="/start_profile", handler=control.start_profile, summary="Start the engine's profiler"
    ),
    ControlRoute(
        method="POST", path="/stop_profile", handler=control.stop_profile, summary="Stop the engine's profiler"
    ),
    ControlRoute(method="POST", path="/update_weights", handler=control.update_weights, summary="Take new weights"),
    ControlRoute(
        method="POST",
        path="/init_weight_transfer_engine",
        handler=control.init_weight_transfer_engine,
        summary="Say where new weights will be",
    ),
    ControlRoute(
        method="POST",
        path="/start_weight_update",
        handler=control.start_weight_update,
        summary="Begin to take new weights in several files",
    ),
    ControlRoute(
        method="POST",
        path="/finish_weight_update",
        handler=control.finish_weight_update,
        summary="Use the new weights of these files",
    ),
)
