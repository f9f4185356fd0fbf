"""open_recorder: the loggers of one front end, from what its caller gave and from installed plugins.

Used by `AsyncLLM`; servers make their Prometheus logger here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Final, cast

from trio_llm.config import EngineConfig
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.frontend.statistics.stats import (
    AggregateStatLogger,
    IterationStats,
    StatLogger,
    StatLoggerFactory,
    StatLoggerSource,
)
from trio_llm.frontend.statistics.totals import Totals
from trio_llm.wire.messages import ModelConfig, SchedulerStats

__all__ = ["ENTRY_POINT_GROUP", "make_metrics", "open_recorder"]

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "trio_llm.stat_loggers"


def open_recorder(config: EngineConfig, given: Sequence[StatLoggerSource], *, num_engines: int) -> StatisticsRecorder:
    """The recorder with all loggers: those that were given and those of installed plugins.

    With `disable_log_stats` and without any logger, it records nothing.

    Raises:
        TypeError: one of those that were given is neither a logger nor a factory.
        Exception: what a factory raises.
    """
    sources = [*given, *_load_plugins()]
    first_rank = config.first_rank
    if config.disable_log_stats and not sources:
        return StatisticsRecorder([], num_engines=num_engines, first_rank=first_rank, is_enabled=False)
    totals = Totals(num_engines=num_engines, first_rank=first_rank)
    ranks = _ranks(config, num_engines)
    loggers = [one for source in sources for one in _make_loggers(source, config, ranks)]
    return StatisticsRecorder([totals, *loggers], num_engines=num_engines, first_rank=first_rank, totals=totals)


def make_metrics(config: EngineConfig, model_name: str) -> PrometheusStatLogger:
    """The Prometheus logger of a server. With `disable_log_stats` it is to be given no statistics."""
    return PrometheusStatLogger(
        model_name,
        engine_indices=_ranks(config, config.num_local_engines),
        has_engine_stats=not config.disable_log_stats,
    )


def _ranks(config: EngineConfig, num_engines: int) -> range:
    return range(config.first_rank, config.first_rank + num_engines)


def _load_plugins() -> Iterator[StatLoggerSource]:
    """One that cannot be loaded is left out, with its error in the log: a server must not fail for it."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            source = point.load()
        except Exception:
            logger.exception("the stat logger %r of the entry point %s cannot be loaded", point.value, point.name)
            continue
        logger.info("statistics go to %s as well (entry point %s)", point.value, point.name)
        yield source


def _make_loggers(source: StatLoggerSource, config: EngineConfig, ranks: Sequence[int]) -> list[StatLogger]:
    if isinstance(source, StatLogger):
        return [source]
    if isinstance(source, type) and issubclass(source, AggregateStatLogger):
        return [source(config, ranks)]
    if not callable(source):
        raise TypeError(f"a stat logger must derive from StatLogger, or be made by a factory: {source!r} is neither")
    make = cast(StatLoggerFactory, source)
    return [_OfEngine(make(config, rank), rank, is_first=rank == ranks[0]) for rank in ranks]


class _OfEngine(StatLogger):
    """Passes on what is about one engine. What is about none goes to the logger of the first engine, so that it
    counts once."""

    def __init__(self, logger: StatLogger, index: int, *, is_first: bool) -> None:
        self._logger = logger
        self._index = index
        self._is_first = is_first

    def __repr__(self) -> str:
        return f"{self._logger!r} of engine {self._index}"

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        if engine_index == self._index:
            self._logger.record(scheduler, iteration, engine_index=engine_index)

    def record_rejection(self, reason: str) -> None:
        if self._is_first:
            self._logger.record_rejection(reason)

    def record_engine_ready(self, model: ModelConfig, *, engine_index: int) -> None:
        if engine_index == self._index:
            self._logger.record_engine_ready(model, engine_index=engine_index)

    def record_operation(self, operation: str, seconds: float | None) -> None:
        if self._is_first:
            self._logger.record_operation(operation, seconds)

    def log(self) -> None:
        self._logger.log()
