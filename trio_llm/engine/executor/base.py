"""Executor: what carries out step plans. StepPlan and StepResult: what goes in and comes out.

Imports no torch, so that the scheduler, the fake executor and their tests run without it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trio_llm.engine.engine_state import WeightsLocation
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.wire.messages import LogprobRow, ModelConfig

__all__ = [
    "DeviceLostError",
    "Executor",
    "LaunchedStep",
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
    """The chunk reaches the last token: the next one is sampled from its last row, or the sequence is pooled."""

    @property
    def needs_logits(self) -> bool:
        """The model's head runs over the last row. An embedding is made without it."""
        pooling = self.sequence.pooling
        return self.samples and (pooling is None or pooling.task == "classify")

    @property
    def follows_pending(self) -> bool:
        """The chunk's last token is the one that the step before samples for this sequence: only the executor can know
        it. To be read at launch."""
        return self.start + self.count > len(self.sequence.token_ids)

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


class LaunchedStep(Protocol):
    """A step under way on the device."""

    def wait(self) -> StepResult:
        """Wait until it is through. Called once, in the order of launches.

        Raises:
            Exception: the device is lost; the engine ends. A fault of one row is a `RowError` in the result.
        """
        ...


class DeviceLostError(Exception):
    """What is on the device is not known any more: the engine must end, even if only a control call had failed."""


class Executor(abc.ABC):
    """Runs steps of a loaded model. Called from one thread."""

    @property
    @abc.abstractmethod
    def info(self) -> ModelConfig:
        """The loaded model, and how many KV blocks there are."""

    @abc.abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin to compute the plan's tokens, to write their K and V into the blocks, to sample, pool and score where
        asked.

        The step before may be under way still; its results are not needed on the host: a token that it samples and
        that this plan computes (`ScheduledChunk.follows_pending`) is taken on the device.

        Raises:
            Exception: the device is lost; the engine ends.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch, and wait. Raises as they do."""
        return self.launch(plan).wait()

    # -------------------------- control: no step is in flight meanwhile, but for `memory_info` and `stop_profile`

    @abc.abstractmethod
    def move(self, weights: WeightsLocation, *, has_cache: bool) -> None:
        """Put the weights there, and free or allocate the KV cache. What is so already stays as it is.

        A KV cache that comes back is empty. Weights that were dropped are read again from where they came from last:
        the model's directory, or that of the last `update_weights`. Steps run only with the weights on the device and
        a cache.

        Raises:
            Exception: there is not enough memory, or the files are gone; of what was asked for, the weights may have
                moved and the cache not, and nothing else has changed.
            DeviceLostError: as it says.
        """

    @abc.abstractmethod
    def update_weights(self, folder: Path) -> None:
        """Take the weights of a directory in Hugging Face form, of the same architecture, in place of those on the
        device. What is in the KV cache belongs to the old ones from then on.

        Raises:
            EngineStartupError: the directory has no such weights; nothing has changed.
            DeviceLostError: as it says.
        """

    @abc.abstractmethod
    def memory_info(self) -> dict[str, int]:
        """Bytes that the weights and the KV cache take, and that are free on the device."""

    @abc.abstractmethod
    def start_profile(self, folder: Path) -> None:
        """Record what the device and the host do from now on, for a file in `folder`. Of no effect while it records.

        Raises:
            NotSupportedError: this executor has nothing to record.
        """

    @abc.abstractmethod
    def stop_profile(self) -> str | None:
        """Write what was recorded and return the file's path; None if nothing was. Raises as `start_profile`."""
