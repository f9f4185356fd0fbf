"""LoggingStatLogger: one line per interval."""

from __future__ import annotations

import logging

import pytest

from trio_llm.frontend.statistics.logging_logger import LoggingStatLogger
from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.wire.messages import SchedulerStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logger(clock: Clock, caplog: pytest.LogCaptureFixture) -> LoggingStatLogger:
    caplog.set_level(logging.INFO)
    return LoggingStatLogger(clock)


def test_rates_are_per_second_since_the_last_line(
    logger: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    batch = IterationStats(num_prompt_tokens=20, num_generation_tokens=40)
    logger.record(SchedulerStats(num_running=2, num_waiting=1, num_free_blocks=3, num_blocks=4), batch)
    clock.now += 10
    logger.log()
    logger.record(None, IterationStats(num_generation_tokens=5))
    clock.now += 5
    logger.log()

    assert caplog.messages == [
        "prompt 2.0 tokens/s, generation 4.0 tokens/s, running 2, waiting 1, KV cache usage 25.0 %",
        "prompt 0.0 tokens/s, generation 1.0 tokens/s, running 2, waiting 1, KV cache usage 25.0 %",
    ]


def test_the_hit_rate_is_that_of_the_prompts_since_the_last_line_and_is_left_out_without_any(
    logger: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for queried, cached in ((60, 0), (40, 25)):
        logger.record(None, IterationStats(num_prompt_tokens=200, num_queried_tokens=queried, num_cached_tokens=cached))
    logger.log()
    logger.record(None, IterationStats(num_generation_tokens=1))
    logger.log()
    logger.record(None, IterationStats(num_queried_tokens=40, num_prompt_tokens=40))
    logger.log()

    rates = [line.partition(", prefix cache hit rate ")[2] for line in caplog.messages]
    assert rates == ["25.0 %", "", "0.0 %"]


def test_an_idle_engine_is_said_to_be_idle_once(
    logger: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    logger.record(SchedulerStats(num_blocks=4, num_free_blocks=4), IterationStats(num_generation_tokens=1))
    for _ in range(4):
        clock.now += 10
        logger.log()

    assert len(caplog.messages) == 2


def test_two_lines_in_the_same_moment_do_not_divide_by_zero(
    logger: LoggingStatLogger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.record(None, IterationStats(num_generation_tokens=1))
    logger.log()

    assert len(caplog.messages) == 1


def test_refused_requests_are_counted_in_the_line_and_break_the_silence(
    logger: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    logger.record_rejection("max_num_queued_reqs")
    logger.record_rejection("max_num_queued_tokens")
    clock.now += 10
    logger.log()
    logger.log()

    assert [line.endswith(", refused 2") for line in caplog.messages] == [True, False]


def test_the_line_sums_up_all_engines_and_has_the_figures_of_each_behind_that(
    logger: LoggingStatLogger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for index, num_free in enumerate((3, 1)):
        stats = SchedulerStats(num_running=2, num_waiting=1, num_free_blocks=num_free, num_blocks=4)
        logger.record(stats, IterationStats(num_generation_tokens=40), engine_index=index)
    clock.now += 10
    logger.log()

    assert caplog.messages == [
        "prompt 0.0 tokens/s, generation 8.0 tokens/s, running 4, waiting 2, KV cache usage 50.0 % "
        "(engine 0: prompt 0.0 tokens/s, generation 4.0 tokens/s, running 2, waiting 1, KV cache usage 25.0 %; "
        "engine 1: prompt 0.0 tokens/s, generation 4.0 tokens/s, running 2, waiting 1, KV cache usage 75.0 %)"
    ]
