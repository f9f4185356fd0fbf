"""RecordingStatLogger: a StatLogger that adds up what it gets, for tests that look at it."""

from __future__ import annotations

from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.wire.messages import SchedulerStats

__all__ = ["RecordingStatLogger"]


class RecordingStatLogger(StatLogger):
    """Adds up."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0
        """Generated."""
        self.num_first_tokens = 0
        self.reasons: list[str] = []
        """Finish reasons, in order."""
        self.e2e_latencies_s: list[float] = []
        self.rejections: list[str] = []
        self.scheduler: SchedulerStats | None = None
        """The newest, of whichever engine."""
        self.engine_indices: set[int] = set()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        self.num_prompt_tokens += iteration.num_prompt_tokens
        self.num_queried_tokens += iteration.num_queried_tokens
        self.num_cached_tokens += iteration.num_cached_tokens
        self.num_tokens += iteration.num_generation_tokens
        self.num_first_tokens += len(iteration.time_to_first_token_s)
        self.reasons += [finished.finish_reason for finished in iteration.finished]
        self.e2e_latencies_s += [finished.e2e_latency_s for finished in iteration.finished]
        self.scheduler = scheduler or self.scheduler
        self.engine_indices.add(engine_index)

    def record_rejection(self, reason: str) -> None:
        self.rejections.append(reason)
