"""Totals: the numbers of all engines together."""

from __future__ import annotations

from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.frontend.statistics.totals import Totals
from trio_llm.wire.messages import SchedulerStats


def test_a_snapshot_sums_up_all_engines_and_an_engine_without_statistics_is_empty() -> None:
    totals = Totals(num_engines=3)
    totals.record(
        SchedulerStats(num_running=2, num_waiting=1, num_free_blocks=4),
        IterationStats(num_prompt_tokens=7, num_generation_tokens=5),
        engine_index=0,
    )
    totals.record(
        SchedulerStats(num_running=1, num_free_blocks=9), IterationStats(num_generation_tokens=6), engine_index=2
    )

    snapshot = totals.snapshot("ready", num_blocks=[10, 12, 9])

    assert (snapshot.num_running, snapshot.num_waiting) == (3, 1)
    assert (snapshot.num_free_kv_blocks, snapshot.num_kv_blocks) == (4 + 12 + 9, 31)
    assert (snapshot.num_prompt_tokens, snapshot.num_generation_tokens) == (7, 11)


def test_only_the_newest_state_of_a_scheduler_counts() -> None:
    totals = Totals()
    for num_running in (5, 2):
        totals.record(SchedulerStats(num_running=num_running), IterationStats(), engine_index=0)
    totals.record(None, IterationStats(num_generation_tokens=1), engine_index=0)

    assert totals.snapshot("ready", num_blocks=[10]).num_running == 2
