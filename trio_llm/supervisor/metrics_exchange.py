"""MetricsExchange: what the front ends count, gathered by the supervisor, so that each of them can show the sums.

Each front end sends its counts every few seconds, and whenever another one is asked for /metrics. What one had counted
when it died goes on counting, so that no counter falls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import trio

from trio_llm.frontend.statistics.logging_logger import LoggingStatLogger
from trio_llm.frontend.statistics.metric_counts import EngineGauges, MetricsSnapshot, merge
from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.supervisor.messages import Metrics, ReportMetrics

__all__ = ["MetricsExchange"]

logger = logging.getLogger(__name__)

COLLECT_S: Final = 0.5
"""How long front ends may take to send their counts. Of one that stands still the last ones are taken."""


@dataclass(slots=True, eq=False)
class _Collection:
    missing: set[int]
    """Front ends whose counts have not come."""
    is_complete: trio.Event = field(default_factory=trio.Event)

    def drop(self, index: int) -> None:
        """The counts of this front end have come, or never will."""
        self.missing.discard(index)
        if not self.missing:
            self.is_complete.set()


class MetricsExchange:
    """The counts of all front ends.

    Args:
        ask: sends a message to a front end, by its index, if it runs.
    """

    def __init__(self, ask: Callable[[int, ReportMetrics], None]) -> None:
        self._ask = ask
        self._newest: dict[int, MetricsSnapshot] = {}
        """By the index of the front end, of those that have sent some."""
        self._retired: MetricsSnapshot | None = None
        """The sum of front ends that have died."""
        self._collections: dict[int, _Collection] = {}
        self._numbers = count(1)

    async def collect(self, asker: int) -> list[MetricsSnapshot]:
        """What the other front ends have counted by now, and those that have died. Takes `COLLECT_S` at most.

        Cancellation: safe.
        """
        others = self._newest.keys() - {asker}
        if others:
            call_id = next(self._numbers)
            collection = self._collections[call_id] = _Collection(set(others))
            for index in others:
                self._ask(index, ReportMetrics(call_id=call_id))
            try:
                with trio.move_on_after(COLLECT_S):
                    await collection.is_complete.wait()
            finally:
                del self._collections[call_id]
        return self._list(without=asker)

    def take(self, index: int, message: Metrics) -> None:
        """A front end has sent its counts."""
        self._newest[index] = message.snapshot
        if collection := self._collections.get(message.call_id):
            collection.drop(index)

    def retire(self, index: int) -> None:
        """A front end is dead: its counts stay, and nothing of it is in flight."""
        for collection in self._collections.values():
            collection.drop(index)
        snapshot = self._newest.pop(index, None)
        if snapshot is None:
            return
        for operation in snapshot.operations.values():
            operation.num_in_flight = 0
        for engine in snapshot.engines.values():
            engine.gauges = EngineGauges()
        self._retired = snapshot if self._retired is None else self._merge([self._retired, snapshot]).copy()

    async def log(self, interval_s: float) -> None:
        """Write one line for all front ends and engines in each interval. Returns never. Cancellation: safe."""
        stat_logger = LoggingStatLogger()
        counters: dict[int, dict[str, int]] = {}
        num_rejections = 0
        while True:
            await trio.sleep(interval_s)
            if snapshots := self._list():
                whole = self._merge(snapshots)
                for index, counts in whole.engines.items():
                    before = counters.get(index, {})
                    grown = {name: value - before.get(name, 0) for name, value in counts.counters.items()}
                    counters[index] = dict(counts.counters)
                    stat_logger.record(counts.gauges.stats, _make_iteration(grown), engine_index=index)
                rejections = sum(whole.rejections.values())
                for _ in range(rejections - num_rejections):
                    stat_logger.record_rejection("")
                num_rejections = rejections
            stat_logger.log()

    def _merge(self, snapshots: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
        """The sum; if they cannot be added up, since an engine came back with another context length, the first one."""
        try:
            return merge(snapshots)
        except ValueError as error:
            logger.warning("statistics of several front ends cannot be added up: %s", error)
            return snapshots[0]

    def _list(self, *, without: int | None = None) -> list[MetricsSnapshot]:
        alive: Sequence[MetricsSnapshot] = [one for index, one in self._newest.items() if index != without]
        return [*alive, *([] if self._retired is None else [self._retired])]


def _make_iteration(grown: dict[str, int]) -> IterationStats:
    return IterationStats(
        num_prompt_tokens=grown["prompt_tokens"],
        num_queried_tokens=grown["queried_tokens"],
        num_cached_tokens=grown["cached_tokens"],
        num_generation_tokens=grown["generation_tokens"],
    )
