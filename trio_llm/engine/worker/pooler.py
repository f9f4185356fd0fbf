"""Pooler: hidden states and logits of a step become vectors, one for each pooling sequence that ends in it.

A vector depends on its own sequence alone; one with NaN or infinity is an error of its own. Used by the torch executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, ScheduledChunk, StepPlan

__all__ = ["Pooler"]

_NOT_FINITE: Final = "the model computed NaN or infinity instead of a vector; this request cannot go on"


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """Over the first tokens of a sequence whose prompt comes in several chunks."""

    total: Tensor  # float32[hidden]
    num_tokens: int


class Pooler:
    """
    Args:
        probabilities: float32[B, labels] of logits [B, labels]; None: the model has no head for classes.
    """

    def __init__(self, probabilities: Callable[[Tensor], Tensor] | None) -> None:
        self._probabilities = probabilities
        self._sums: WeakKeyDictionary[Sequence, _Sum] = WeakKeyDictionary()
        """Of means that are not complete. Nobody tells when a sequence is aborted: with it, its sum goes."""

    def needs_hidden(self, plan: StepPlan) -> bool:
        """Hidden states of the plan's tokens are looked at."""
        return any(_reads_hidden(chunk) for chunk in plan.chunks)

    def pool(self, plan: StepPlan, hidden: Tensor | None, logits: Tensor) -> list[PooledVector | RowError]:
        """The vectors of the pooling sequences that end in this step, in the plan's order.

        To be called for every step: means are summed up chunk by chunk.

        Args:
            hidden: [T, hidden], of all the plan's tokens; may be None unless `needs_hidden`.
            logits: [B, labels], a row for each sequence that is classified in this step; else not looked at.
        """
        vectors: list[Tensor | None] = []  # float32, of any length; None: tokens of a mean are missing
        classes: Iterator[Tensor] | None = None
        for chunk, first in _with_first_row(plan):
            pooling = chunk.sequence.pooling
            if pooling is None:
                continue
            if pooling.task == "classify" and chunk.samples:
                classes = classes or iter(self._classify(logits))
                vectors.append(next(classes))
            elif _reads_hidden(chunk):
                assert hidden is not None
                if pooling.is_mean:
                    vector = self._add_to_mean(chunk, hidden[first : first + chunk.count])
                else:
                    vector = hidden[first + chunk.count - 1].float()
                if chunk.samples:
                    is_scaled = pooling.normalize and vector is not None
                    vectors.append(torch.nn.functional.normalize(vector, dim=0) if is_scaled else vector)
        return _to_bytes(vectors)

    def _classify(self, logits: Tensor) -> Tensor:
        assert self._probabilities is not None, "a model without classes is asked for some"
        return self._probabilities(logits)

    def _add_to_mean(self, chunk: ScheduledChunk, hidden: Tensor) -> Tensor | None:
        """The mean of all tokens up to the end of a chunk, [hidden]. None: some before the chunk were never summed."""
        total = hidden.float().sum(dim=0)
        if chunk.start > 0:
            # A sequence that was preempted begins at 0 again, and leaves behind what it had.
            before = self._sums.pop(chunk.sequence, None)
            if before is None or before.num_tokens != chunk.start:
                return None
            total += before.total
        num_tokens = chunk.start + chunk.count
        if not chunk.samples:
            self._sums[chunk.sequence] = _Sum(total, num_tokens)
        return total / num_tokens


def _to_bytes(vectors: list[Tensor | None]) -> list[PooledVector | RowError]:
    """All vectors leave the device at once: each time costs a wait for it."""
    whole = [vector for vector in vectors if vector is not None]
    numbers = torch.cat(whole).cpu() if whole else torch.empty(0)
    parts = iter(numbers.split([len(vector) for vector in whole]))
    results: list[PooledVector | RowError] = []
    for vector in vectors:
        if vector is None:
            results.append(RowError("the mean of this request's tokens lacks some: a bug of the engine"))
            continue
        part = next(parts)
        if torch.isfinite(part).all():
            results.append(PooledVector(part.numpy().astype("<f4").tobytes()))
        else:
            results.append(RowError(_NOT_FINITE))
    return results


def _reads_hidden(chunk: ScheduledChunk) -> bool:
    pooling = chunk.sequence.pooling
    return pooling is not None and pooling.task == "embed" and (chunk.samples or pooling.is_mean)


def _with_first_row(plan: StepPlan) -> Iterator[tuple[ScheduledChunk, int]]:
    """Each chunk, and the row of its first token in the batch."""
    first = 0
    for chunk in plan.chunks:
        yield chunk, first
        first += chunk.count
