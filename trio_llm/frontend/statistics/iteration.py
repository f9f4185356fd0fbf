"""StatisticsRecorder: counts what the output handler delivers and hands it to the StatLoggers, once a drained batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from trio_llm.frontend.requests.state import RequestState
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats, StatLogger
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import SchedulerStats

__all__ = ["RequestClock", "StatisticsRecorder"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestClock:
    """When things happened to one request; Trio's clock, seconds."""

    arrived_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0


class StatisticsRecorder:
    """Gathers one IterationStats after the other. A logger that raises is left out from then on."""

    def __init__(self, loggers: Sequence[StatLogger]) -> None:
        self._loggers = list(loggers)
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
        """Another engine is ready after one that died."""
        self._iteration.num_restarts += 1
        self._has_news = True

    def tokens(self, state: RequestState, clock: RequestClock, count: int, now_s: float) -> None:
        """Tokens were delivered to one request."""
        iteration = self._iteration
        iteration.num_generation_tokens += count
        if clock.first_token_s is None:
            clock.first_token_s = now_s
            # One prompt and one first token for all the choices of an answer; each choice is a request that ends.
            if state.family is None or state.family.take_first_token():
                iteration.time_to_first_token_s.append(now_s - clock.arrived_s)
                iteration.num_prompt_tokens += len(state.request.prompt_token_ids)
                iteration.num_queried_tokens += len(state.request.prompt_token_ids)
                iteration.num_cached_tokens += state.num_cached_tokens
        else:
            iteration.inter_token_latency_s.append(now_s - clock.last_token_s)
        clock.last_token_s = now_s

    def vector(self, state: RequestState) -> None:
        """A pooling request has got what it waits for: its prompt counts, though no token comes."""
        self._iteration.num_prompt_tokens += state.num_prompt_tokens
        self._iteration.num_cached_tokens += state.num_cached_tokens

    def more_prompt_tokens(self, count: int) -> None:
        """A session has got another input."""
        self._iteration.num_prompt_tokens += count

    def request_finished(self, state: RequestState, clock: RequestClock, reason: FinishReason) -> None:
        """A request is over for its reader. Once a request."""
        params = state.request.params
        self._has_news = True
        self._iteration.finished.append(
            FinishedRequestStats(
                request_id=state.external_id,
                finish_reason=reason,
                num_prompt_tokens=state.num_prompt_tokens,
                num_cached_tokens=state.num_cached_tokens,
                num_output_tokens=state.num_tokens,
                max_tokens=params.max_tokens or 0,
                e2e_latency_s=trio.current_time() - clock.arrived_s,
                time_to_first_token_s=None if clock.first_token_s is None else clock.first_token_s - clock.arrived_s,
            )
        )

    def rejection(self, reason: str) -> None:
        """A request was refused for the load."""
        self._tell_each(lambda stat_logger: stat_logger.record_rejection(reason))

    def flush(self) -> None:
        """Hand over what was gathered since the last time."""
        if not self._has_news:
            return
        iteration, self._iteration = self._iteration, IterationStats()
        scheduler, self._scheduler = self._scheduler, None
        self._has_news = False
        self._tell_each(lambda stat_logger: stat_logger.record(scheduler, iteration))

    def log(self) -> None:
        """Let the loggers write their line."""
        self._tell_each(lambda stat_logger: stat_logger.log())

    def _tell_each(self, tell: Callable[[StatLogger], None]) -> None:
        for stat_logger in list(self._loggers):
            try:
                tell(stat_logger)
            except Exception:
                logger.exception("%r is left out of the statistics from now on", stat_logger)
                self._loggers.remove(stat_logger)
