"""Totals: what all engines did since they were opened, as numbers that a program can read. Behind `llm.statistics()`.

Pure. A StatLogger that `AsyncLLM` has unless statistics are off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trio_llm.frontend.control.status import EngineState
from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import SchedulerStats

__all__ = ["EngineStatistics", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot, summed over all engines. Schedulers' numbers are those after the last step whose output has come."""

    state: EngineState
    num_running: int
    """Sequences that get tokens in every step, as far as the budget goes."""
    num_waiting: int
    """Sequences in the engine's queue."""
    num_free_kv_blocks: int
    num_kv_blocks: int
    """0 while the model is loading."""
    num_prompt_tokens: int
    """Prompt tokens of requests whose first token, or vector, has come."""
    num_generation_tokens: int
    num_finished: Mapping[FinishReason, int]
    """Requests that are over, by reason: stop, length, abort, error. Each choice of an answer counts."""
    num_refused: int
    """Requests that were refused because of the load."""
    num_restarts: int
    """Engines that were started after another one had died."""


class Totals(StatLogger):
    """Adds up."""

    def __init__(self, *, num_engines: int = 1, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._schedulers: list[SchedulerStats | None] = [None] * num_engines
        """The newest statistics by the index of the engine; None before the first ones."""
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_refused = 0
        self._num_restarts = 0
        self._finished: Counter[FinishReason] = Counter()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int = 0) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            self._schedulers[engine_index - self._first_rank] = scheduler
        self._num_prompt_tokens += iteration.num_prompt_tokens
        self._num_generation_tokens += iteration.num_generation_tokens
        self._num_restarts += iteration.num_restarts
        if iteration.finished:  # a batch of tokens usually ends no request
            self._finished.update(request.finish_reason for request in iteration.finished)

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        self._num_refused += 1

    def snapshot(self, state: EngineState, *, num_blocks: Sequence[int]) -> EngineStatistics:
        """The totals so far.

        Args:
            num_blocks: KV blocks by the index of the engine; 0: not known yet.
        """
        schedulers = [
            scheduler or SchedulerStats(num_free_blocks=count)
            for scheduler, count in zip(self._schedulers, num_blocks, strict=True)
        ]
        return EngineStatistics(
            state=state,
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
            num_free_kv_blocks=sum(scheduler.num_free_blocks for scheduler in schedulers),
            num_kv_blocks=sum(num_blocks),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_finished=MappingProxyType(
                {reason: self._finished[reason] for reason in ("stop", "length", "abort", "error")}
            ),
            num_refused=self._num_refused,
            num_restarts=self._num_restarts,
        )
