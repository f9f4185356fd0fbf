"""Routes that pool: /v1/embeddings, /pooling and /score.

Used by the route table. Each turns a body into prompts and parameters, gets a vector for every prompt, and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import trio
from starlette.responses import Response

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.answers.client_names import in_client_names
from trio_llm.frontend.http.answers.generation import check_batch
from trio_llm.frontend.http.openai.pooling import (
    MAX_INPUTS,
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    embedding_params,
    pair_up,
    pooling_params,
    score_params,
)
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openai.vectors import (
    embedding_entries,
    list_beginning,
    list_end,
    pooling_entries,
    score_entries,
)
from trio_llm.frontend.http.request_reader import ApiContext, Call
from trio_llm.frontend.requests.input_processor import check_task
from trio_llm.frontend.requests.pooling import cosine
from trio_llm.frontend.run_in_order import run_in_order
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams

__all__ = ["embed", "pool", "score"]

_TURN_BYTES: Final = 64 * 1024
"""Bytes of vectors that are written before other tasks get a turn: a few milliseconds of work."""


async def embed(api: ApiContext, call: Call[EmbeddingRequest]) -> Response:
    """POST /v1/embeddings."""
    prompts = _prompts(api, call.body)
    outputs = await _outputs(api, call, prompts, embedding_params(call.body), field="input")
    entries = embedding_entries(outputs, as_base64=call.body.encoding_format == "base64")
    return await _answer(call, "embd", outputs, entries)


async def pool(api: ApiContext, call: Call[PoolingRequest]) -> Response:
    """POST /pooling."""
    tasks = api.client.get_supported_tasks()
    params = pooling_params(call.body, tasks)
    check_task(tasks, params.task)
    outputs = await _outputs(api, call, _prompts(api, call.body), params, field="input")
    entries = pooling_entries(outputs, as_base64=call.body.encoding_format == "base64")
    return await _answer(call, "pool", outputs, entries)


async def score(api: ApiContext, call: Call[ScoreRequest]) -> Response:
    """POST /score."""
    first, second = pair_up(call.body)
    outputs = await _outputs(api, call, [*first, *second], score_params(call.body), field="text_1")
    vectors, others = outputs[: len(first)], outputs[len(first) :]
    return await _answer(call, "score", outputs, score_entries(_scores(vectors, others)))


def _prompts(api: ApiContext, body: EmbeddingRequest) -> list[str | list[int]]:
    limit = None if body.tokenization.may_cut else api.client.model_config.max_model_len
    return parse_prompts(body.input, name="input", most=MAX_INPUTS, max_model_len=limit, room=0)


async def _outputs(
    api: ApiContext, call: Call[Any], prompts: Sequence[str | list[int]], params: PoolingParams, *, field: str
) -> list[PoolingOutput]:
    """A vector for each prompt, all worked on at the same time, in the order of the prompts.

    Args:
        field: name of the body's field that has the prompts.

    Cancellation: all are aborted.

    Raises:
        RequestTimeoutError: the request's time is over.
        InvalidRequestError, NotSupportedError, EngineError: as `EngineClient.encode`, alone or in a group.
    """
    with call.timeout.within():
        try:
            token_ids = await api.client.renderer.render_prompts(prompts, call.body.tokenization)
        except InvalidRequestError as error:
            raise in_client_names(error, {}, prompt=field) from None
        if len(prompts) > 1:
            check_batch(api.client.config, token_ids, field=field)
        ids = [call.request_id] if len(prompts) == 1 else [f"{call.request_id}-{i}" for i in range(len(prompts))]
        encode = partial(_encode, api, call, params, field)
        return await run_in_order(encode, list(zip(ids, token_ids, strict=True)))


async def _encode(
    api: ApiContext, call: Call[Any], params: PoolingParams, field: str, prompt: tuple[str, list[int]]
) -> PoolingOutput:
    request_id, token_ids = prompt
    api.running.add(request_id)
    try:
        return await api.client.encode(
            token_ids,
            params,
            request_id=request_id,
            priority=call.body.priority or 0,
            data_parallel_rank=call.routing.data_parallel_rank,
            session_id=call.routing.session_id,
            arrival_time=call.arrival_time_s,
            trace_headers=call.trace_headers,
        )
    except InvalidRequestError as error:
        raise in_client_names(error, {}, prompt=field) from None
    finally:
        api.running.discard(request_id)


def _scores(first: Sequence[PoolingOutput], second: Sequence[PoolingOutput]) -> Iterator[float]:
    """One for each pair; a single one of the first goes with all of the second."""
    alone = first[0].values
    for index, other in enumerate(second):
        yield cosine(alone if len(first) == 1 else first[index].values, other.values)


async def _answer(call: Call[Any], prefix: str, outputs: Sequence[PoolingOutput], entries: Iterable[bytes]) -> Response:
    turn = max(1, _TURN_BYTES // max(len(output.data) for output in outputs))
    parts: list[bytes] = []
    for entry in entries:
        parts.append(entry)
        if len(parts) % turn == 0:
            await trio.lowlevel.checkpoint()
    body = b"".join((list_beginning(call.head(prefix)), b",".join(parts), list_end(outputs)))
    return Response(body, media_type="application/json", headers={"x-request-id": call.request_id})
