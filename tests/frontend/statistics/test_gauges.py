"""Gauges after aborts, errors, deaths and restarts: 0 when nothing runs, whatever happened before."""

from __future__ import annotations

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.sampling import SamplingParams
from trio_llm.testing.fake_llm import FakeLLM, open_fake_llm

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
CONSTANT = ("vllm:cache_config_info", "trio_llm_build_info", "trio_llm_engine_statistics", "vllm:engine_sleep_state")
"""Gauges that say what something is, and not how much of it there is."""


def gauges(metrics: PrometheusStatLogger) -> dict[str, float]:
    """The values of all gauges of ours that are not 0."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        if family.type == "gauge" and family.name.startswith(("vllm:", "trio_llm")) and family.name not in CONSTANT
        for sample in family.samples
        if sample.value
    }


async def leave(llm: FakeLLM, number: int, started: trio.Event) -> None:
    """A reader that leaves in one of several ways, before or after its first token."""
    with trio.CancelScope() as scope:
        async with llm.generate(f"reader {number}", LONG, request_id=f"r{number}") as stream:
            if number == 0:
                started.set()
            if number % 3:
                await anext(stream)
            if number % 4 == 1:
                llm.abort(f"r{number}")
                await anext(stream)
            elif number % 4 == 2:
                scope.cancel()
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_after_a_thousand_aborts_and_two_deaths_every_gauge_is_0(
    run_ahead: int, autojump_clock: MockClock
) -> None:
    metrics = PrometheusStatLogger("m")
    async with open_fake_llm(
        step_s=0.01, on_engine_death="restart", stat_loggers=[metrics], max_num_seqs=32, run_ahead=run_ahead
    ) as llm:
        for round_ in range(5):
            started = trio.Event()
            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(leave, llm, number, started)
                await started.wait()
                await trio.sleep(0.02)
                if round_ == 0:
                    assert len(gauges(metrics)) >= 3, "something runs, and waits, and has blocks"
                if round_ in (1, 3):
                    llm.kill()
                    await trio.lowlevel.checkpoint()
        await llm.assert_idle()
        await trio.sleep(1)

        assert llm.statistics().num_restarts == 2
        assert llm.statistics().num_finished["abort"] == 1000
        assert gauges(metrics) == {}


async def test_an_engine_that_is_dead_runs_nothing_and_is_in_no_state(autojump_clock: MockClock) -> None:
    metrics = PrometheusStatLogger("m")
    async with open_fake_llm(step_s=0.1, stat_loggers=[metrics]) as llm:
        async with llm.generate("Once", LONG) as stream:
            await anext(stream)
            assert gauges(metrics)
            llm.kill()
            with pytest.raises(EngineDeadError):
                while True:
                    await anext(stream)

        assert gauges(metrics) == {}
        assert 'sleep_state="awake"} 0.0' in metrics.render()[0].decode()


async def test_errors_leave_no_gauge() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_fake_llm(stat_loggers=[metrics], failing_row_prompt=7, faulty_token_prompt=8) as llm:
        for token_id in (7, 8):
            with pytest.raises(EngineGenerateError):
                await llm.complete([token_id, 1], LONG)
        await llm.assert_idle()

        assert gauges(metrics) == {}
        assert llm.statistics().num_finished["error"] == 2


async def test_sleep_and_pause_show_in_the_gauges(autojump_clock: MockClock) -> None:
    metrics = PrometheusStatLogger("m")
    async with open_fake_llm(step_s=0.1, stat_loggers=[metrics]) as llm:

        def shown(line: str) -> bool:
            return f"{line}\n" in metrics.render()[0].decode()

        def is_in(state: str) -> bool:
            return shown(f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}} 1.0')

        await llm.pause_generation(mode="wait")
        async with llm.generate("waits", LONG) as stream:
            await trio.sleep(1.5)  # an idle engine says once a second what has changed
            assert gauges(metrics) == {
                "vllm:num_requests_waiting{'engine': '0', 'model_name': 'm'}": 1,
                "vllm:num_requests_waiting_by_reason{'engine': '0', 'model_name': 'm', 'reason': 'deferred'}": 1,
            }
            await llm.resume_generation()
            await anext(stream)
        await llm.assert_idle()
        assert is_in("awake")

        await llm.sleep(1)
        assert is_in("weights_offloaded")
        await llm.sleep(2)
        assert is_in("discard_all")
        await llm.wake_up()
        assert is_in("awake")

        assert gauges(metrics) == {}
        text = metrics.render()[0].decode()
        assert 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 2.0' in text
        assert 'vllm:sleep_mode_operation_duration_seconds_count{operation="wake"} 1.0' in text
