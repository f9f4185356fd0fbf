"""What is counted per engine, and `StatLogger`, the interface for recording it.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import SchedulerStats

__all__ = ["FinishedRequestStats", "IterationStats", "StatLogger"]


@dataclass(slots=True, kw_only=True)
class FinishedRequestStats:
    """One request that ended."""

    request_id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    e2e_latency_s: float
    time_to_first_token_s: float | None
    """None: it ended before its first token."""


@dataclass(slots=True)
class IterationStats:
    """What one drained batch of engine outputs held."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token, or vector, came."""
    num_queried_tokens: int = 0
    """Prompt tokens that the prefix cache was asked for: those of these requests, but not of a session's later inputs,
    which follow what the session has."""
    num_cached_tokens: int = 0
    """How many of the queried tokens were in the cache when the request came."""
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_latency_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    num_restarts: int = 0
    """Engines that were started after another one had died."""


class StatLogger(Protocol):
    """Records statistics. Called in the output handler: must not block and must not raise."""

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        """One drained batch of one engine.

        Args:
            scheduler: the newest state of the engine's scheduler, if the batch had one.
            engine_index: its rank.
        """
        ...

    def record_rejection(self, reason: str) -> None:
        """A request was refused for the load: `reason` is that of its OverloadedError. Called in the caller's task."""
        ...

    def log(self) -> None:
        """Called every ten seconds and by `do_log_stats()`: write a line, if this logger writes any."""
        ...
