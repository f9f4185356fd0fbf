"""Executor: what carries out a step plan. StepPlan and StepResult: what goes in and comes out.

Imports no torch, so that the scheduler, the fake executor and their tests run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.wire.messages import LogprobRow, ModelConfig

__all__ = [
    "Executor",
    "PooledVector",
    "ProgressCallback",
    "RowError",
    "SampledToken",
    "ScheduledChunk",
    "StepPlan",
    "StepResult",
]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one sequence that one step computes: positions start to start + count - 1."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """The chunk reaches the last known token: the next one is sampled from its last row, or the sequence is pooled."""

    @property
    def needs_logits(self) -> bool:
        """The model's head runs over the last row. An embedding is made without it."""
        pooling = self.sequence.pooling
        return self.samples and (pooling is None or pooling.task == "classify")

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose log-probabilities this chunk gives: its rows come right before them.

        Empty unless the request asked for them. To be read before the plan is committed.
        """
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        start = max(self.start + 1, sequence.num_scored_tokens)
        return range(start, max(start, min(self.start + self.count + 1, sequence.num_prompt_tokens)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The chunks' tokens together stay within the budget; block tables cover every position computed."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: LogprobRow | None = None


@dataclass(frozen=True, slots=True)
class PooledVector:
    """What a pooling sequence is computed for."""

    data: bytes
    """float32, little-endian; every number is finite."""


@dataclass(frozen=True, slots=True)
class RowError:
    """This row failed; the others of the step are fine."""

    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[SampledToken | PooledVector | RowError, ...]
    """One a chunk with `samples`, in the plan's order; vectors are for pooling sequences, tokens for all others."""
    scored: tuple[list[LogprobRow], ...] = ()
    """One a chunk with `scored` positions, in the plan's order; one row a position."""


ProgressCallback = Callable[[str, int, int], None]
"""(phase, done, total) while a model loads; total 0: not known."""


class Executor(Protocol):
    """Runs steps of a loaded model. Called from one thread."""

    @property
    def info(self) -> ModelConfig: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their K and V into the blocks, sample and score where asked.

        Raises:
            Exception: the device is lost; the engine ends. A fault of one row is a `RowError` in the result.
        """
        ...
