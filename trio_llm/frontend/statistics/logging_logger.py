"""LoggingStatLogger: one line in the log per interval.

Given to the output handler, which records every batch and calls `log()` every ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.wire.messages import SchedulerStats

__all__ = ["LoggingStatLogger"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Interval:
    """What one engine did since the last line."""

    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0

    def add(self, other: IterationStats | _Interval) -> None:
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_queried_tokens += other.num_queried_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_generation_tokens += other.num_generation_tokens


class LoggingStatLogger(StatLogger):
    """Writes rates since its last line, summed over all engines, with the figures of each behind them if there are
    several. When nothing runs any more one line says so, and then none follows.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_log = clock()
        self._schedulers: dict[int, SchedulerStats] = {}
        """The newest statistics by the index of the engine."""
        self._intervals: dict[int, _Interval] = {}
        """By the index of the engine."""
        self._num_rejections = 0
        self._was_idle = True

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int = 0) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            self._schedulers[engine_index] = scheduler
        interval = self._intervals.get(engine_index)
        if interval is None:
            interval = self._intervals[engine_index] = _Interval()
        interval.add(iteration)

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        self._num_rejections += 1

    def log(self) -> None:
        """Write the line, and count from 0 again."""
        now = self._clock()
        elapsed_s = max(now - self._last_log, 1e-9)
        whole = _Interval()
        for interval in self._intervals.values():
            whole.add(interval)
        schedulers = list(self._schedulers.values())
        num_unfinished = sum(scheduler.num_running + scheduler.num_waiting for scheduler in schedulers)
        is_idle = not (whole.num_prompt_tokens or whole.num_generation_tokens or self._num_rejections or num_unfinished)
        if not (is_idle and self._was_idle):
            _logger.info(
                "%s%s%s%s",
                _describe(whole, schedulers, elapsed_s),
                _hit_rate(whole),
                f", refused {self._num_rejections}" if self._num_rejections else "",
                self._engines(elapsed_s),
            )
        self._was_idle = is_idle
        self._last_log = now
        self._intervals.clear()
        self._num_rejections = 0

    def _engines(self, elapsed_s: float) -> str:
        """The figures of each engine; empty if there is but one."""
        indices = sorted(self._schedulers.keys() | self._intervals.keys())
        if len(indices) < 2:
            return ""
        parts = [
            f"engine {index}: "
            + _describe(
                self._intervals.get(index, _Interval()),
                [self._schedulers[index]] if index in self._schedulers else [],
                elapsed_s,
            )
            for index in indices
        ]
        return f" ({'; '.join(parts)})"


def _describe(interval: _Interval, schedulers: list[SchedulerStats], elapsed_s: float) -> str:
    num_blocks = sum(scheduler.num_blocks for scheduler in schedulers)
    num_used = num_blocks - sum(scheduler.num_free_blocks for scheduler in schedulers)
    return (
        f"prompt {interval.num_prompt_tokens / elapsed_s:.1f} tokens/s, "
        f"generation {interval.num_generation_tokens / elapsed_s:.1f} tokens/s, "
        f"running {sum(scheduler.num_running for scheduler in schedulers)}, "
        f"waiting {sum(scheduler.num_waiting for scheduler in schedulers)}, "
        f"KV cache usage {100 * num_used / num_blocks if num_blocks else 0.0:.1f} %"
    )


def _hit_rate(interval: _Interval) -> str:
    """Empty if the cache was asked for no prompt: 0 % would say that it was of no use."""
    if not interval.num_queried_tokens:
        return ""
    return f", prefix cache hit rate {100 * interval.num_cached_tokens / interval.num_queried_tokens:.1f} %"
