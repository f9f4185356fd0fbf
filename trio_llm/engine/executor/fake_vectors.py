"""fake_vector: the result of the FakeExecutor for a pooling request. Pure."""

from __future__ import annotations

import math
import struct
from typing import Final

from trio_llm.engine.scheduling.step import PooledVector
from trio_llm.pooling import PoolingParams

__all__ = ["fake_vector"]

_PRIME: Final = 2**61 - 1
_FACTOR: Final = 48271
"""Factor of a Lehmer generator (Park, Miller and Stockmeyer 1993), with a larger prime."""


def fake_vector(digest: int, pooling: PoolingParams, size: int) -> PooledVector:
    """Numbers that depend on the prompt and on the kind of pooling, and on nothing else.

    Args:
        digest: 64 bits that stand for the prompt.
        size: numbers of an embedding, or classes.
    """
    state = (digest ^ (0x5DEECE66D if pooling.is_mean else 0)) % _PRIME or 1
    numbers: list[float] = []
    for _ in range(size):
        state = state * _FACTOR * _FACTOR % _PRIME
        numbers.append(state / _PRIME)
    if pooling.task == "classify":
        total = sum(numbers) if size > 1 else 1.0
        numbers = [number / total for number in numbers]
    else:
        numbers = [2 * number - 1 for number in numbers]
        length = math.hypot(*numbers)
        if pooling.normalize and length > 0:
            numbers = [number / length for number in numbers]
    return PooledVector(struct.pack(f"<{size}f", *numbers))
