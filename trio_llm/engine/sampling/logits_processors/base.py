"""LogitsProcessor: changes the scores of the rows that ask for it, before temperature. The base of all of them.

One is made for the rows of a batch that need it, and applied at each step until the batch changes. Used by the sampler.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.scheduling.sequence import Sequence

__all__ = ["NO_LIMIT", "LogitsProcessor", "ProcessedRow"]

NO_LIMIT = 2**31
"""More steps than any answer has."""


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedRow:
    """One row of the scores, for the token at `position` of its sequence."""

    sequence: Sequence
    position: int
    index: int
    """The row's place in the scores."""
    batch_index: int
    """Its place in the batch, and so in `previous`."""


class LogitsProcessor(abc.ABC):
    """Changes the scores of R rows of a batch."""

    num_steps: int = NO_LIMIT
    """Steps that this object is good for. Then the next one must be made."""

    @staticmethod
    @abc.abstractmethod
    def applies(sequence: Sequence, position: int) -> bool:
        """Whether the row of the token at `position` needs this processor."""

    @classmethod
    @abc.abstractmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        """A processor for rows it applies to, at least one."""

    @abc.abstractmethod
    def apply(self, scores: Tensor, previous: Tensor) -> None:
        """Change the scores in place, for the next step. Nothing waits for the device.

        Args:
            scores: float32[P, V] of all rows that any processor applies to, contiguous.
            previous: int64[B], the last token of each row of the batch.
        """

    def close(self) -> None:  # noqa: B027 - not abstract: most have nothing to do here
        """No further step comes."""
