"""StatisticsRecorder: counts what the engines deliver and hands it to the StatLoggers, once per drained batch.

Takes numbers and clocks, and knows nothing about requests. Used by the output handler and by `RequestRegistry`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats, StatLogger
from trio_llm.wire.messages import SchedulerStats

if TYPE_CHECKING:
    from trio_llm.errors import EngineDeadError
    from trio_llm.frontend.control.engine import Engine

__all__ = ["EngineRecorder", "RequestClock", "StatisticsRecorder"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestClock:
    """When things happened to one request; Trio's clock, seconds."""

    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0


class EngineRecorder:
    """Gathers what one engine delivers, one IterationStats after the other."""

    __slots__ = ("_has_news", "_iteration", "_scheduler")

    def __init__(self) -> None:
        self._iteration = IterationStats()
        self._scheduler: SchedulerStats | None = None
        self._has_news = False

    def scheduler(self, stats: SchedulerStats) -> None:
        """The newest state of the engine's scheduler."""
        self._scheduler = stats
        self._has_news = True

    def engine_gone(self) -> None:
        """Nothing runs and nothing waits in an engine that is gone."""
        self.scheduler(SchedulerStats())

    def engine_restarted(self) -> None:
        """Another incarnation is ready after one that died."""
        self._iteration.num_restarts += 1
        self._has_news = True

    def first_tokens(
        self, clock: RequestClock, count: int, now_s: float, *, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """The first tokens of a request were delivered, and with them its prompt counts as computed."""
        iteration = self._iteration
        iteration.time_to_first_token_s.append(now_s - clock.arrived_s)
        iteration.num_prompt_tokens += num_prompt_tokens
        iteration.num_queried_tokens += num_prompt_tokens
        iteration.num_cached_tokens += num_cached_tokens
        self.first_tokens_of_sibling(clock, count, now_s)

    def first_tokens_of_sibling(self, clock: RequestClock, count: int, now_s: float) -> None:
        """The first tokens of a choice were delivered whose prompt was counted with another choice of the answer."""
        self._iteration.num_generation_tokens += count
        clock.first_token_s = clock.last_token_s = now_s

    def tokens(self, clock: RequestClock, count: int, now_s: float) -> None:
        """Tokens after the first ones were delivered to a request."""
        iteration = self._iteration
        iteration.num_generation_tokens += count
        iteration.inter_token_latency_s.append(now_s - clock.last_token_s)
        clock.last_token_s = now_s

    def tokens_of_message(self, count: int, latencies_s: list[float]) -> None:
        """All of one message that `tokens` would be called for: one call in place of one per row.

        Args:
            count: tokens of all these rows.
            latencies_s: per row, the seconds since the request's last tokens. The caller sets each clock's
                `last_token_s`.
        """
        iteration = self._iteration
        iteration.num_generation_tokens += count
        iteration.inter_token_latency_s += latencies_s

    def vector(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A pooling request has got its vector: its prompt counts, though no token comes."""
        iteration = self._iteration
        iteration.num_prompt_tokens += num_prompt_tokens
        iteration.num_queried_tokens += num_prompt_tokens
        iteration.num_cached_tokens += num_cached_tokens

    def more_prompt_tokens(self, count: int) -> None:
        """A session has got another input."""
        self._iteration.num_prompt_tokens += count

    def request_finished(self, stats: FinishedRequestStats) -> None:
        """A request is over for its reader. Once per request."""
        self._iteration.finished.append(stats)
        self._has_news = True

    def take(self) -> tuple[SchedulerStats | None, IterationStats] | None:
        """What was gathered since the last time. None: nothing that is worth a record of its own."""
        if not self._has_news:
            return None
        gathered = self._scheduler, self._iteration
        self._scheduler, self._iteration, self._has_news = None, IterationStats(), False
        return gathered


class StatisticsRecorder:
    """One `EngineRecorder` per engine, and the loggers. A logger that raises is left out from then on.

    An `EngineListener`.

    Args:
        first_rank: of the engines; loggers are told ranks.
    """

    def __init__(self, loggers: Sequence[StatLogger], *, num_engines: int = 1, first_rank: int = 0) -> None:
        self.engines = [EngineRecorder() for _ in range(num_engines)]
        """By the index of the engine."""
        self._first_rank = first_rank
        self._loggers = list(loggers)

    def on_ready(self, engine: Engine) -> None:
        """Count the restart, if it is one."""
        if engine.num_restarts:
            self.engines[engine.index].engine_restarted()

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing runs in an engine that is gone."""
        self.engines[engine.index].engine_gone()

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Nothing runs in an engine that is gone."""
        self.engines[engine.index].engine_gone()

    def rejection(self, reason: str) -> None:
        """A request was refused because of the load."""
        self._call_each(lambda stat_logger: stat_logger.record_rejection(reason))

    def flush(self) -> None:
        """Hand over what was gathered since the last time."""
        for index, engine in enumerate(self.engines):
            if (gathered := engine.take()) is not None:
                self._record(self._first_rank + index, *gathered)

    def _record(self, engine_index: int, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        self._call_each(lambda stat_logger: stat_logger.record(scheduler, iteration, engine_index=engine_index))

    def log(self) -> None:
        """Let the loggers write their line."""
        self._call_each(lambda stat_logger: stat_logger.log())

    def _call_each(self, call: Callable[[StatLogger], None]) -> None:
        for stat_logger in list(self._loggers):
            try:
                call(stat_logger)
            except Exception:
                logger.exception("%r failed and records no statistics from now on", stat_logger)
                self._loggers.remove(stat_logger)
