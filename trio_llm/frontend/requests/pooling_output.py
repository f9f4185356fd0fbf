"""Pooled outputs on their way to a reader: from the engine's row through the collector to `encode`.

A pooling request is registered, weighed, sent, aborted and ended as any other: what is different stands here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from trio_llm.errors import EngineGenerateError, EngineUnavailableError
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.outputs import CompletionOutput, PoolingOutput, RequestOutput
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["PooledOutput", "cosine", "pooled_output", "result_of", "run_in_order"]

_NUMBER_BYTES = 4

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class PooledOutput(RequestOutput, gc=False):
    """The one output of a pooling request, in the form that the collector carries."""

    data: bytes = b""
    """As `PoolingOutput.data`."""


def pooled_output(external_id: str, num_prompt_tokens: int, row: EngineCoreOutput, weight_version: str) -> PooledOutput:
    """What a reader gets for the engine's row.

    Raises:
        EngineGenerateError: it has no vector.
    """
    if not row.pooled or len(row.pooled) % _NUMBER_BYTES:
        raise EngineGenerateError("the engine ended the request without a vector")
    end = CompletionOutput(0, "", [], None, row.finish_reason)
    return PooledOutput(
        external_id, num_prompt_tokens, row.num_cached_tokens, [end], True, None, weight_version, row.pooled
    )


def result_of(output: RequestOutput, *, is_draining: bool) -> PoolingOutput:
    """What `encode` gives for all that its reader got.

    Raises:
        EngineUnavailableError: the request was aborted, since the server is shutting down.
        EngineGenerateError: it was aborted otherwise.
    """
    if isinstance(output, PooledOutput):
        return PoolingOutput(
            output.request_id,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.data,
            output.weight_version,
        )
    if is_draining:
        raise EngineUnavailableError("the server is shutting down and has ended the request without its vector")
    raise EngineGenerateError("the request was aborted before its vector was computed")


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the angle between two vectors of one size, from -1 to 1; 0 if one of them is all zeros."""
    length = math.hypot(*first) * math.hypot(*second)
    product = sum(map(operator.mul, first, second))
    return max(-1.0, min(1.0, product / length)) if length > 0 else 0.0


async def run_in_order(work: Callable[[_In], Awaitable[_Out]], inputs: Sequence[_In]) -> list[_Out]:
    """The results for all inputs, worked on at the same time, in the order of the inputs.

    Cancellation: every piece of work is cancelled.

    Raises:
        Exception: what the first one that failed has raised; the others are cancelled. Those that fail in the same
            moment come as a group.
    """
    results: dict[int, _Out] = {}

    async def run(index: int) -> None:
        results[index] = await work(inputs[index])

    with unwrap_single():
        async with trio.open_nursery() as nursery:
            for index in range(len(inputs)):
                nursery.start_soon(run, index)
    return [results[index] for index in range(len(inputs))]
