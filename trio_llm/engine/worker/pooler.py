"""Pooler: makes vectors of the hidden states and logits of a step, one for each pooling sequence that ends in it.

A vector depends on its own sequence alone; one with NaN or infinity is an error of its own. Used by the torch executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, ScheduledChunk, StepPlan
from trio_llm.engine.transfer import HostCopy

__all__ = ["PendingVectors", "Pooler"]

_NOT_FINITE: Final = "the model computed NaN or infinity instead of a vector; this request cannot go on"
_INCOMPLETE: Final = "the engine lost some tokens of this request's mean, which is a bug; send the request again"


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """Sum over the first tokens of a sequence whose prompt comes in several chunks."""

    total: Tensor  # float32[hidden]
    num_tokens: int


class PendingVectors:
    """The vectors of a step that was launched. They leave the device with one copy."""

    def __init__(self, vectors: Rows[Tensor | None]) -> None:
        """
        Args:
            vectors: float32, of any length; None: tokens of a mean are missing.
        """
        self._lengths = [None if vector is None else len(vector) for vector in vectors]
        whole = [vector for vector in vectors if vector is not None]
        self._copy = HostCopy(torch.cat(whole)) if whole else None

    def wait(self) -> list[PooledVector | RowError]:
        """All vectors in order. The one place that waits for the device."""
        numbers = self._copy.wait()[0] if self._copy is not None else torch.empty(0)
        results: list[PooledVector | RowError] = []
        begin = 0
        for length in self._lengths:
            if length is None:
                results.append(RowError(_INCOMPLETE))
                continue
            vector, begin = numbers[begin : begin + length], begin + length
            if torch.isfinite(vector).all():
                results.append(PooledVector(vector.numpy().astype("<f4").tobytes()))
            else:
                results.append(RowError(_NOT_FINITE))
        return results


class Pooler:
    """
    Args:
        probabilities: float32[B, labels] of logits [B, labels]; None: the model has no head for classes.
    """

    def __init__(self, probabilities: Callable[[Tensor], Tensor] | None) -> None:
        self._probabilities = probabilities
        self._sums: WeakKeyDictionary[Sequence, _Sum] = WeakKeyDictionary()
        """Sums of means that are not complete. An aborted sequence is not reported here; its sum goes with it."""

    def needs_hidden(self, plan: StepPlan) -> bool:
        """The plan's vectors are made from hidden states, or some of them."""
        return any(_reads_hidden(chunk) for chunk in plan.chunks)

    def launch(
        self, plan: StepPlan, hidden: Tensor | None, logits: Tensor, *, first_tokens: Rows[int]
    ) -> PendingVectors | None:
        """Begin to make the vectors of the pooling sequences that end in this step; None if it has no such sequence.

        To be called for every step: means are summed up chunk by chunk.

        Args:
            hidden: [T, H]; may be None unless `needs_hidden`.
            logits: [B, labels], a row for each sequence that is classified in this step; rows after them are ignored.
            first_tokens: the row of each chunk's first token in `hidden`.
        """
        vectors: list[Tensor | None] = []
        classes: Iterator[Tensor] | None = None
        for chunk, first in zip(plan.chunks, first_tokens, strict=True):
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
        return PendingVectors(vectors) if vectors else None

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


def _reads_hidden(chunk: ScheduledChunk) -> bool:
    pooling = chunk.sequence.pooling
    return pooling is not None and pooling.task == "embed" and (chunk.samples or pooling.is_mean)
