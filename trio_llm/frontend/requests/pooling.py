"""Pooling requests, as callers see them: the result of `encode`, similarity, and several requests at once.

A pooling request is registered, weighed, sent, aborted and ended as any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from trio_llm.errors import EngineGenerateError, EngineUnavailableError
from trio_llm.frontend.requests.output.pooled_output import PooledOutput
from trio_llm.outputs import PoolingOutput, RequestOutput

__all__ = ["cosine", "result_of"]

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
