"""Pooling requests, as callers see them: the result of `encode`, similarity, and several requests at once.

A pooling request is registered, weighed, sent, aborted and ended as any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from trio_llm.errors import EngineGenerateError, EngineUnavailableError
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.requests.output.pooled_output import PooledOutput
from trio_llm.outputs import PoolingOutput, RequestOutput

__all__ = ["cosine", "result_of", "run_in_order"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")


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
    """The cosine of the angle between two vectors of one size, from -1 to 1; 0 if one of them is all zeros."""
    length = math.hypot(*first) * math.hypot(*second)
    product = sum(map(operator.mul, first, second))
    return max(-1.0, min(1.0, product / length)) if length > 0 else 0.0


async def run_in_order(work: Callable[[_In], Awaitable[_Out]], inputs: Sequence[_In]) -> list[_Out]:
    """The results for all inputs, worked on at the same time, in the order of the inputs.

    Cancellation: every piece of work is cancelled.

    Raises:
        Exception: what the first work that failed raised; the others are cancelled. Errors of the same moment come as a
            group.
    """
    results: dict[int, _Out] = {}

    async def run(index: int) -> None:
        results[index] = await work(inputs[index])

    with unwrap_single():
        async with trio.open_nursery() as nursery:
            for index in range(len(inputs)):
                nursery.start_soon(run, index)
    return [results[index] for index in range(len(inputs))]
