"""Executor: what carries out step plans.

Imports no torch, so that the fake executor and its tests run without it.
"""

from __future__ import annotations

import abc
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from trio_llm.engine.device import WeightsLocation
from trio_llm.engine.scheduling.step import StepPlan, StepResult
from trio_llm.engine.worker.weight_files import WeightSource
from trio_llm.wire.messages import ModelConfig

__all__ = ["Executor", "LaunchedStep"]


class LaunchedStep(Protocol):
    """A step that the device computes."""

    def wait(self) -> StepResult:
        """Wait for the result. Called once per step, in the order of launches.

        Raises:
            Exception: the device is lost; the engine ends. A fault of one row is a `RowError` in the result.
        """
        ...


class Executor(abc.ABC):
    """Runs steps of a loaded model. Called from one thread."""

    @property
    @abc.abstractmethod
    def info(self) -> ModelConfig:
        """The loaded model, and how many KV blocks there are."""

    @abc.abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin a step: compute the plan's tokens, write their K and V into the blocks, and sample, pool, and compute
        prompt log-probabilities where the plan asks for it.

        The step before may still be in flight. A token that it samples and that this plan computes
        (`ScheduledChunk.follows_pending`) is taken from the device.

        Raises:
            Exception: the device is lost; the engine ends.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch, and wait. Raises as they do."""
        return self.launch(plan).wait()

    # ------------------ control: no step is in flight, except where it says so

    @abc.abstractmethod
    def move(self, weights: WeightsLocation, *, has_cache: bool) -> None:
        """Move the weights, and free or allocate the KV cache. No effect where that is so already.

        A KV cache that is allocated again is empty. Weights that were dropped are read again from the directory that
        they were read from last: the model's, or that of the last `update_weights`. Steps run only with the weights on
        the device and a cache.

        Raises:
            Exception: there is not enough memory, or the files are gone. The weights may have moved and the cache not;
                nothing else has changed.
            DeviceLostError: the content of the device is unknown.
        """

    @abc.abstractmethod
    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights on the device by others of the same architecture. The content of the KV cache still
        belongs to the old weights.

        Args:
            source: a directory in Hugging Face form; or files that have all weights together, of which those that were
                staged are not read again.

        Raises:
            EngineStartupError: it has no such weights, or a file has another content by now; nothing has changed.
            DeviceLostError: the content of the device is unknown.
        """

    @abc.abstractmethod
    def stage_weights(self, path: Path) -> str:
        """Read a file with some of the weights into host memory, for an update to come. Returns its checksum. Steps may
        be in flight.

        Raises:
            EngineStartupError: it cannot be read, or is not a safetensors file.
        """

    @abc.abstractmethod
    def keep_staged(self, checksums: Collection[str]) -> None:
        """Forget all files that were staged but these. Steps may be in flight."""

    @abc.abstractmethod
    def weights_checksum(self, prefix: str) -> str:
        """A checksum of the weights whose names begin so. Steps may be in flight.

        Raises:
            InvalidRequestError: there are none, or the weights sleep.
        """

    @abc.abstractmethod
    def memory_info(self) -> dict[str, int]:
        """Bytes that the weights and the KV cache take, and bytes that are free on the device. Steps may be in
        flight."""

    @abc.abstractmethod
    def start_profile(self, folder: Path) -> None:
        """Record from now on what the device and the host do, for a file in `folder`. No effect while it records.

        Raises:
            NotSupportedError: this executor has nothing to record.
        """

    @abc.abstractmethod
    def stop_profile(self) -> str | None:
        """Write the recording and return the file's path; None if nothing was recorded. Steps may be in flight. Raises
        as `start_profile`."""
