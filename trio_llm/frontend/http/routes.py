"""Routes: what the paths of the OpenAI API do, and the document that describes them.

Loaded by the app when it is needed first. Each route turns a body into parameters, generates, and renders.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.assembly import Choice, Event, Usage, whole_choices
from trio_llm.frontend.http.control_routes import control_routes
from trio_llm.frontend.http.event_stream import EventRenderer, EventStreamResponse
from trio_llm.frontend.http.generation import Generation, RunningRequests
from trio_llm.frontend.http.model_names import served_names
from trio_llm.frontend.http.openai.chat import chat_params, param_names, parse_chat_request
from trio_llm.frontend.http.openai.completions import (
    MAX_PROMPTS,
    check_num_choices,
    completion_params,
    parse_completion_request,
)
from trio_llm.frontend.http.openai.openapi import openapi_document
from trio_llm.frontend.http.openai.prompt_echo import chat_view, completion_view
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openai.responses import (
    AnswerHead,
    ChatChunks,
    CompletionChunks,
    chat_answer,
    completion_answer,
)
from trio_llm.frontend.http.pooling_routes import PoolingRoutes
from trio_llm.frontend.http.request_reader import RequestReader, request_id_of, request_timeout
from trio_llm.frontend.http.server.errors import MethodNotAllowedError, RouteNotFoundError
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send
from trio_llm.frontend.requests.input_processor import check_task
from trio_llm.version import __version__

__all__ = ["create_routes"]

Answer = Callable[[AnswerHead, list[Choice], Usage], bytes]


def create_routes(client: EngineClient, config: ServerConfig, running: RunningRequests) -> ASGIApp:
    """The routes as one ASGI app for scopes of type `http`.

    Raises (when called): RouteNotFoundError, MethodNotAllowedError, and what the routes raise. Nothing is caught
    here: the shell makes replies of errors.
    """
    incoming = RequestReader(client, config)
    routes = _Routes(client, config, running, incoming)
    pooling = PoolingRoutes(client, running, incoming)
    router = Router(
        [
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.complete, methods=["POST"]),
            Route("/v1/embeddings", pooling.embed, methods=["POST"]),
            Route("/pooling", pooling.pool, methods=["POST"]),
            Route("/score", pooling.score, methods=["POST"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.show_model, methods=["GET"]),
            Route("/openapi.json", routes.describe, methods=["GET"]),
            *(control_routes(client, config) if config.dev_mode else ()),
        ],
        redirect_slashes=False,
    )

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


class _Routes:
    def __init__(
        self, client: EngineClient, config: ServerConfig, running: RunningRequests, incoming: RequestReader
    ) -> None:
        self._client = client
        self._config = config
        self._incoming = incoming
        self._running = running
        self._created = int(time.time())
        self._document: bytes | None = None

    # -------------------------------------------------------------------------------------- generating

    async def chat(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        self._client.check_admission()
        began_s = trio.current_time()
        check_task(self._client.get_supported_tasks(), "generate")
        request = parse_chat_request(await self._incoming.json(http))
        timeout = request_timeout(http, request.timeout, began_s)
        params = chat_params(request, self._client.model_config.sampling_defaults)
        model = self._incoming.model_name(request.model)
        with timeout.within():
            token_ids = await self._client.renderer.render_chat(
                request.messages,
                add_generation_prompt=request.adds_generation_prompt,
                continue_final_message=bool(request.continue_final_message),
                template_kwargs=request.chat_template_kwargs,
            )
        view = chat_view(request, token_ids)
        request_id = request_id_of(http, request.request_id)
        head = AnswerHead(id=f"chatcmpl-{request_id}", created=int(time.time()), model=model)
        generation = Generation(
            client=self._client,
            running=self._running,
            prompts=[token_ids],
            params=params,
            request_id=request_id,
            cache_salt=request.cache_salt,
            timeout=timeout,
            view=view,
            param_names=param_names(request),
        )
        if not request.stream:
            return await _whole(generation, head, chat_answer)
        chunks = ChatChunks(
            head,
            with_usage=request.wants_usage,
            with_continuous_usage=request.wants_continuous_usage,
            prompt_token_ids=token_ids if request.return_token_ids else None,
        )
        return self._stream(generation, chunks)

    async def complete(self, http: Request) -> Response:
        """POST /v1/completions."""
        self._client.check_admission()
        began_s = trio.current_time()
        check_task(self._client.get_supported_tasks(), "generate")
        request = parse_completion_request(await self._incoming.json(http))
        timeout = request_timeout(http, request.timeout, began_s)
        limit, defaults = self._client.model_config.max_model_len, self._client.model_config.sampling_defaults
        completion_params(request, defaults, room=1)  # refuses before the costly part
        model = self._incoming.model_name(request.model)
        given = parse_prompts(request.prompt, name="prompt", most=MAX_PROMPTS, max_model_len=limit)
        check_num_choices(len(given), request.n or 1)
        render = partial(
            self._client.renderer.render_prompt, add_special_tokens=request.add_special_tokens is not False
        )
        with timeout.within():
            prompts = [await render(prompt) for prompt in given]
            view = await completion_view(request, given, prompts, renderer=self._client.renderer)
        params = completion_params(request, defaults, room=limit - max(map(len, prompts)))
        request_id = request_id_of(http, request.request_id)
        head = AnswerHead(id=f"cmpl-{request_id}", created=int(time.time()), model=model)
        generation = Generation(
            client=self._client,
            running=self._running,
            prompts=prompts,
            params=params,
            request_id=request_id,
            cache_salt=request.cache_salt,
            timeout=timeout,
            view=view,
        )
        if not request.stream:
            return await _whole(generation, head, completion_answer)
        chunks = CompletionChunks(
            head, with_usage=request.wants_usage, with_continuous_usage=request.wants_continuous_usage
        )
        return self._stream(generation, chunks)

    def _stream(self, generation: Generation, renderer: EventRenderer) -> Response:
        return EventStreamResponse(
            generation,
            renderer,
            keep_alive_s=self._config.sse_keep_alive_interval_s,
            headers={"x-request-id": generation.request_id},
        )

    # -------------------------------------------------------------------------------------- describing

    async def list_models(self, http: Request) -> Response:
        """GET /v1/models."""
        cards = [self._card(name) for name in served_names(self._client, self._config)]
        return _json_response({"object": "list", "data": cards})

    async def show_model(self, http: Request) -> Response:
        """GET /v1/models/{name}."""
        name = http.path_params["name"]
        if not name:
            raise RouteNotFoundError(http.scope["path"])
        return _json_response(self._card(self._incoming.model_name(name)))

    async def describe(self, http: Request) -> Response:
        """GET /openapi.json."""
        if self._document is None:
            self._document = msgspec.json.encode(openapi_document(__version__))
        return Response(self._document, media_type="application/json")

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trio_llm",
            "root": name,
            "parent": None,
            "max_model_len": self._client.model_config.max_model_len,
            "permission": [],
        }


async def _whole(generation: Generation, head: AnswerHead, answer: Answer) -> Response:
    assembler = generation.assembler()
    events: list[Event] = []
    with generation.timeout.within():
        async with generation.open() as outputs:
            async for index, output in outputs:
                events.extend(assembler.feed(index, output))
    assembler.check_finished()
    write = partial(answer, head, whole_choices(events), assembler.usage)
    # Log-probabilities of prompts may be a hundred thousand: in a thread, streams get a turn meanwhile.
    is_long = generation.params.prompt_logprobs is not None
    body = await trio.to_thread.run_sync(write, abandon_on_cancel=True) if is_long else write()
    return Response(body, media_type="application/json", headers={"x-request-id": generation.request_id})


def _json_response(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
