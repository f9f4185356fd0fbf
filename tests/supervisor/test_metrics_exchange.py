"""MetricsExchange: the counts of several front ends, of which some are silent or dead."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from trio_llm.frontend.statistics.metric_counts import MetricsSnapshot, merge
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats
from trio_llm.supervisor.messages import Metrics, ReportMetrics
from trio_llm.supervisor.metrics_exchange import COLLECT_S, MetricsExchange
from trio_llm.wire.messages import SchedulerStats


class FrontEnds:
    """Answer when they are asked, but for those in `silent`."""

    def __init__(self) -> None:
        self.loggers = {index: PrometheusStatLogger("m") for index in (1, 2, 3)}
        self.silent: set[int] = set()
        self.exchange = MetricsExchange(self.ask)

    def ask(self, index: int, message: ReportMetrics) -> None:
        if index not in self.silent:
            self.report(index, message.call_id)

    def report(self, index: int, call_id: int = 0) -> None:
        self.exchange.take(index, Metrics(call_id=call_id, snapshot=self.loggers[index].snapshot()))

    def count(self, index: int, tokens: int) -> None:
        self.loggers[index].record(SchedulerStats(num_running=index), IterationStats(num_generation_tokens=tokens))


def tokens_of(snapshots: list[MetricsSnapshot]) -> int:
    return merge(snapshots).engines[0].counters["generation_tokens"] if snapshots else 0


async def test_each_gets_the_newest_counts_of_the_others(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    assert await front_ends.exchange.collect(1) == []
    for index in (1, 2, 3):
        front_ends.report(index)
        front_ends.count(index, 10**index)

    assert tokens_of(await front_ends.exchange.collect(1)) == 1100
    assert tokens_of(await front_ends.exchange.collect(3)) == 110
    assert trio.current_time() == 0


async def test_of_one_that_is_silent_the_last_counts_are_taken_after_a_while(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    front_ends.count(2, 5)
    for index in (1, 2, 3):
        front_ends.report(index)
    front_ends.count(2, 70)
    front_ends.count(3, 1)
    front_ends.silent.add(2)

    assert tokens_of(await front_ends.exchange.collect(1)) == 6
    assert trio.current_time() == pytest.approx(COLLECT_S)


async def test_what_the_dead_had_counted_goes_on_counting(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    front_ends.exchange.retire(1)  # it had sent nothing
    for tokens in (3, 40):
        front_ends.count(1, tokens)
        front_ends.loggers[1].record_operation("sleep", None)
        front_ends.report(1)
        front_ends.exchange.retire(1)
        front_ends.loggers[1] = PrometheusStatLogger("m")

    snapshots = await front_ends.exchange.collect(2)
    assert tokens_of(snapshots) == 43
    assert merge(snapshots).operations["sleep"].num_in_flight == 0


async def test_a_scrape_does_not_wait_for_one_that_dies_meanwhile(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    for index in (1, 2):
        front_ends.report(index)
    front_ends.silent.add(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front_ends.exchange.collect, 1)
        await trio.testing.wait_all_tasks_blocked()
        front_ends.exchange.retire(2)

    assert trio.current_time() == 0


async def test_a_scrape_that_is_cancelled_leaves_nothing(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    front_ends.report(2)
    front_ends.silent.add(2)
    with trio.move_on_after(COLLECT_S / 2):
        await front_ends.exchange.collect(1)

    assert not front_ends.exchange._collections


async def test_nothing_runs_at_a_front_end_that_is_dead(autojump_clock: MockClock) -> None:
    front_ends = FrontEnds()
    front_ends.count(2, 5)
    front_ends.report(2)
    front_ends.exchange.retire(2)

    assert merge(await front_ends.exchange.collect(1)).engines[0].gauges.stats == SchedulerStats()


async def test_counts_that_do_not_fit_together_end_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    front_ends = FrontEnds()
    front_ends.loggers[2] = PrometheusStatLogger("m", max_model_len=100)
    for index in (1, 2):
        finished = FinishedRequestStats(
            request_id="r",
            finish_reason="stop",
            num_prompt_tokens=3,
            num_cached_tokens=0,
            num_output_tokens=2,
            max_tokens=4,
            e2e_latency_s=1.0,
            time_to_first_token_s=0.5,
        )
        front_ends.loggers[index].record(None, IterationStats(finished=[finished]))
        front_ends.report(index)
        front_ends.exchange.retire(index)

    assert "cannot be added up" in caplog.text


async def test_one_line_is_logged_for_all(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    front_ends = FrontEnds()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front_ends.exchange.log, 10.0)
        front_ends.count(1, 50)
        front_ends.count(2, 150)
        for index in (1, 2):
            front_ends.report(index)
        await trio.sleep(11)
        front_ends.count(1, 100)
        front_ends.report(1)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()

    assert len(caplog.records) == 2
