"""StatisticsRecorder: counts what the engines deliver and hands it to the StatLoggers, once per drained batch.

Takes numbers and clocks, and knows nothing about requests. Used by the output handler and by `RequestRegistry`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trio_llm.errors import NotSupportedError
from trio_llm.frontend.control.status import EngineState
from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats, StatLogger
from trio_llm.frontend.statistics.totals import EngineStatistics, Totals
from trio_llm.wire.messages import SchedulerStats

if TYPE_CHECKING:
    from trio_llm.errors import EngineDeadError
    from trio_llm.frontend.control.engine import Engine

__all__ = ["EngineRecorder", "StatisticsRecorder"]

logger = logging.getLogger(__name__)


class EngineRecorder:
    """Gathers what one engine delivers, one IterationStats after the other."""

    __slots__ = ("_engine_time_s", "_has_news", "_iteration", "_num_counted", "_scheduler")

    def __init__(self) -> None:
        self._iteration = IterationStats()
        self._scheduler: SchedulerStats | None = None
        self._has_news = False
        self._num_counted = 0
        """Tokens of this iteration that are in its `step_tokens`."""
        self._engine_time_s = 0.0

    def message(self, stats: SchedulerStats, engine_time_s: float) -> None:
        """A message of the engine is about to be delivered. It has the newest state of the engine's scheduler."""
        self._end_step()
        self._engine_time_s = engine_time_s
        self._scheduler = stats
        self._has_news = True

    def engine_gone(self) -> None:
        """Nothing runs and nothing waits in an engine that is gone."""
        self.message(SchedulerStats(), self._engine_time_s)

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
        iteration.num_generation_tokens += count
        iteration.num_prompt_tokens += num_prompt_tokens
        iteration.num_queried_tokens += num_prompt_tokens
        iteration.num_cached_tokens += num_cached_tokens

    def first_tokens_of_sibling(self, count: int) -> None:
        """The first tokens of a choice were delivered whose prompt was counted with another choice of the answer."""
        self._iteration.num_generation_tokens += count

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
        self._end_step()
        iteration = self._iteration
        iteration.engine_time_s = self._engine_time_s
        gathered = self._scheduler, iteration
        self._scheduler, self._iteration, self._has_news, self._num_counted = None, IterationStats(), False, 0
        return gathered

    def _end_step(self) -> None:
        """All of a message was delivered: what it brought is what its step computed."""
        iteration = self._iteration
        num_tokens = iteration.num_prompt_tokens + iteration.num_generation_tokens
        if num_tokens > self._num_counted:
            iteration.step_tokens.append(num_tokens - self._num_counted)
            self._num_counted = num_tokens


class StatisticsRecorder:
    """One `EngineRecorder` per engine, and the loggers. A logger that raises is left out from then on.

    An `EngineListener`. Made by `open_recorder`.

    Args:
        first_rank: of the engines; loggers are told ranks.
        is_enabled: False: nothing is recorded, and there is no logger.
        totals: one of the loggers, for `llm.statistics()`.
    """

    def __init__(
        self,
        loggers: Sequence[StatLogger],
        *,
        num_engines: int = 1,
        first_rank: int = 0,
        is_enabled: bool = True,
        totals: Totals | None = None,
    ) -> None:
        self.is_enabled = is_enabled
        self._totals = totals
        self._first_rank = first_rank
        self.engines = [EngineRecorder() if is_enabled else None for _ in range(num_engines)]
        """By the index of the engine. None: nothing is recorded."""
        self._loggers = list(loggers)

    def on_ready(self, engine: Engine) -> None:
        """Count the restart, if it is one."""
        recorder, model, rank = self.engines[engine.index], engine.model, self._first_rank + engine.index
        if recorder is None or model is None:
            return
        if engine.num_restarts:
            recorder.engine_restarted()
        self._call_each(lambda stat_logger: stat_logger.record_engine_ready(model, engine_index=rank))

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing runs in an engine that is gone."""
        if (recorder := self.engines[engine.index]) is not None:
            recorder.engine_gone()

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Nothing runs in an engine that is gone."""
        self.on_lost(engine, str(error))

    def rejection(self, reason: str) -> None:
        """A request was refused because of the load."""
        self._call_each(lambda stat_logger: stat_logger.record_rejection(reason))

    def operation(self, name: str, seconds: float | None) -> None:
        """As `StatLogger.record_operation`."""
        self._call_each(lambda stat_logger: stat_logger.record_operation(name, seconds))

    def flush(self) -> None:
        """Hand over what was gathered since the last time."""
        for index, engine in enumerate(self.engines):
            if engine is not None and (gathered := engine.take()) is not None:
                self._record(self._first_rank + index, *gathered)

    def _record(self, engine_index: int, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        self._call_each(lambda stat_logger: stat_logger.record(scheduler, iteration, engine_index=engine_index))

    def snapshot(self, state: EngineState, *, num_blocks: Sequence[int]) -> EngineStatistics:
        """As `Totals.snapshot`.

        Raises:
            NotSupportedError: statistics are off.
        """
        if self._totals is None:
            raise NotSupportedError("statistics are off (disable_log_stats), and there is no stat logger")
        return self._totals.snapshot(state, num_blocks=num_blocks)

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
