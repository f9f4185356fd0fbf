"""LoggingStatLogger: one line in the log per interval.

Given to the output handler, which records every batch and calls `log()` every ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.wire.messages import SchedulerStats

__all__ = ["LoggingStatLogger"]

_logger = logging.getLogger(__name__)


class LoggingStatLogger:
    """Writes rates since its last line, summed over all engines. When nothing runs any more one line says so, and then
    none follows.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_log = clock()
        self._schedulers: dict[int, SchedulerStats] = {}
        """The newest statistics by the index of the engine."""
        self._num_prompt_tokens = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._num_generation_tokens = 0
        self._num_rejections = 0
        self._was_idle = True

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int = 0) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            self._schedulers[engine_index] = scheduler
        self._num_prompt_tokens += iteration.num_prompt_tokens
        self._num_queried_tokens += iteration.num_queried_tokens
        self._num_cached_tokens += iteration.num_cached_tokens
        self._num_generation_tokens += iteration.num_generation_tokens

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        self._num_rejections += 1

    def log(self) -> None:
        """Write the line, and count from 0 again."""
        now = self._clock()
        elapsed_s = max(now - self._last_log, 1e-9)
        schedulers = self._schedulers.values()
        num_running = sum(scheduler.num_running for scheduler in schedulers)
        num_waiting = sum(scheduler.num_waiting for scheduler in schedulers)
        num_blocks = sum(scheduler.num_blocks for scheduler in schedulers)
        is_idle = not (
            self._num_prompt_tokens or self._num_generation_tokens or self._num_rejections or num_running or num_waiting
        )
        if not (is_idle and self._was_idle):
            num_used = num_blocks - sum(scheduler.num_free_blocks for scheduler in schedulers)
            _logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache usage %.1f %%%s%s",
                self._num_prompt_tokens / elapsed_s,
                self._num_generation_tokens / elapsed_s,
                num_running,
                num_waiting,
                100 * num_used / num_blocks if num_blocks else 0.0,
                self._hit_rate(),
                f", refused {self._num_rejections}" if self._num_rejections else "",
            )
        self._was_idle = is_idle
        self._last_log = now
        self._num_prompt_tokens = self._num_generation_tokens = self._num_rejections = 0
        self._num_queried_tokens = self._num_cached_tokens = 0

    def _hit_rate(self) -> str:
        """Empty if the cache was asked for no prompt: 0 % would say that it was of no use."""
        if not self._num_queried_tokens:
            return ""
        return f", prefix cache hit rate {100 * self._num_cached_tokens / self._num_queried_tokens:.1f} %"
