"""Executor: what carries out step plans.

Imports no torch, so that the fake executor and its tests run without it.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Protocol

from trio_llm.engine.device import WeightsLocation
from trio_llm.engine.scheduling.step import StepPlan, StepResult
from trio_llm.wire.messages import ModelConfig

__all__ = ["Executor", "LaunchedStep"]


class LaunchedStep(Protocol):
    """A step under way on the device."""

    def wait(self) -> StepResult:
        """Wait until it is through. Called once, in the order of launches.

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
