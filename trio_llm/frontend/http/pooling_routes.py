"""PoolingRoutes: what /v1/embeddings, /pooling and /score do.

Part of the routes. Each turns a body into prompts and parameters, gets a vector for every prompt, and renders.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from starlette.requests import Request
from starlette.responses import Response

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.generation import RunningRequests, check_batch
from trio_llm.frontend.http.openai.field_errors import name_as_asked
from trio_llm.frontend.http.openai.pooling import (
    MAX_INPUTS,
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    VectorFields,
    embedding_params,
    pair_up,
    parse_vector_request,
    pooling_params,
    score_params,
)
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openai.responses import AnswerHead
from trio_llm.frontend.http.openai.vectors import (
    embedding_entries,
    list_beginning,
    list_end,
    pooling_entries,
    score_entries,
)
from trio_llm.frontend.http.request_reader import RequestReader, request_id_of, request_timeout
from trio_llm.frontend.http.server.timeouts import RequestTimeout
from trio_llm.frontend.requests.input_processor import check_task
from trio_llm.frontend.requests.pooling import cosine, run_in_order
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams

__all__ = ["PoolingRoutes"]

_TURN_BYTES: Final = 64 * 1024
"""Of vectors, a few milliseconds of work, after which other tasks get a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What is the same for all prompts of one HTTP request."""

    head: AnswerHead
    params: PoolingParams
    request_id: str
    timeout: RequestTimeout
    add_special_tokens: bool
    field: str
    """Of the body: where the prompts were."""


class PoolingRoutes:
    """All are POST, and none streams."""

    def __init__(self, client: EngineClient, running: RunningRequests, incoming: RequestReader) -> None:
        self._client = client
        self._running = running
        self._incoming = incoming

    async def embed(self, http: Request) -> Response:
        """POST /v1/embeddings."""
        self._client.check_admission()
        check_task(self._client.get_supported_tasks(), "embed")
        began_s = trio.current_time()
        request = parse_vector_request(EmbeddingRequest, await self._incoming.json(http))
        call = self._call(http, request, embedding_params(request), began_s, "embd", "input")
        outputs = await self._outputs(call, self._prompts(request.input))
        as_base64 = request.encoding_format == "base64"
        return await _answer(call, outputs, embedding_entries(outputs, as_base64=as_base64))

    async def pool(self, http: Request) -> Response:
        """POST /pooling."""
        self._client.check_admission()
        began_s = trio.current_time()
        request = parse_vector_request(PoolingRequest, await self._incoming.json(http))
        tasks = self._client.get_supported_tasks()
        params = pooling_params(request, tasks)
        check_task(tasks, params.task)
        call = self._call(http, request, params, began_s, "pool", "input")
        outputs = await self._outputs(call, self._prompts(request.input))
        as_base64 = request.encoding_format == "base64"
        return await _answer(call, outputs, pooling_entries(outputs, as_base64=as_base64))

    async def score(self, http: Request) -> Response:
        """POST /score."""
        self._client.check_admission()
        check_task(self._client.get_supported_tasks(), "score")
        began_s = trio.current_time()
        request = parse_vector_request(ScoreRequest, await self._incoming.json(http))
        first, second = pair_up(request)
        call = self._call(http, request, score_params(request), began_s, "score", "text_1")
        outputs = await self._outputs(call, [*first, *second])
        vectors, others = outputs[: len(first)], outputs[len(first) :]
        return await _answer(call, outputs, score_entries(_scores(vectors, others)))

    def _prompts(self, value: object) -> list[str | list[int]]:
        limit = self._client.model_config.max_model_len
        return parse_prompts(value, name="input", most=MAX_INPUTS, max_model_len=limit, room=0)

    def _call(
        self, http: Request, request: VectorFields, params: PoolingParams, began_s: float, prefix: str, field: str
    ) -> _Call:
        timeout = request_timeout(http, request.timeout, began_s)
        model = self._incoming.model_name(request.model)
        request_id = request_id_of(http, request.request_id)
        return _Call(
            head=AnswerHead(id=f"{prefix}-{request_id}", created=int(time.time()), model=model),
            params=params,
            request_id=request_id,
            timeout=timeout,
            add_special_tokens=request.add_special_tokens is not False,
            field=field,
        )

    async def _outputs(self, call: _Call, prompts: Sequence[str | list[int]]) -> list[PoolingOutput]:
        """A vector for each prompt, all worked on at the same time, in the order of the prompts.

        Cancellation: all are aborted.

        Raises:
            RequestTimeoutError: the request's time is over.
            InvalidRequestError, NotSupportedError, EngineError: as `EngineClient.encode`, alone or in a group.
        """
        render = partial(self._client.renderer.render_prompt, add_special_tokens=call.add_special_tokens)
        with call.timeout.within():
            token_ids = [await render(prompt) for prompt in prompts]
            if len(prompts) > 1:
                check_batch(self._client.config, token_ids, field=call.field)
            return await run_in_order(partial(self._encode, call, token_ids), range(len(prompts)))

    async def _encode(self, call: _Call, prompts: Sequence[list[int]], index: int) -> PoolingOutput:
        request_id = call.request_id if len(prompts) == 1 else f"{call.request_id}-{index}"
        self._running.add(request_id)
        try:
            return await self._client.encode(prompts[index], call.params, request_id=request_id)
        except InvalidRequestError as error:
            raise name_as_asked(error, {"prompt": call.field}) from None
        finally:
            self._running.discard(request_id)


def _scores(first: Sequence[PoolingOutput], second: Sequence[PoolingOutput]) -> Iterator[float]:
    """One for each pair; a single one of the first goes with all of the second."""
    alone = first[0].values
    for index, other in enumerate(second):
        yield cosine(alone if len(first) == 1 else first[index].values, other.values)


async def _answer(call: _Call, outputs: Sequence[PoolingOutput], entries: Iterable[bytes]) -> Response:
    turn = max(1, _TURN_BYTES // max(len(output.data) for output in outputs))
    parts: list[bytes] = []
    for entry in entries:
        parts.append(entry)
        if len(parts) % turn == 0:
            await trio.lowlevel.checkpoint()
    body = b"".join((list_beginning(call.head), b",".join(parts), list_end(outputs)))
    return Response(body, media_type="application/json", headers={"x-request-id": call.request_id})
