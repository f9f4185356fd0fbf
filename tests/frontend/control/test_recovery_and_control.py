"""Recovery meets control: engines die while they sleep, while they are paused, in a call, and before all is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tests.frontend.test_recovery import FOREVER_S, restarting, wait_for, whole
from tests.support.asking import ask
from trio_llm import SamplingParams
from trio_llm.config import EngineConfig
from trio_llm.engine.device import DeviceLostError
from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.control.monitor import EngineMonitor
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.testing import FakeLLM, open_fake_llm
from trio_llm.wire.messages import ModelConfig

PARAMS = SamplingParams(seed=1, max_tokens=20)


async def die(llm: FakeLLM, state: str = "ready") -> None:
    """One engine dies, and the next one is where it was."""
    llm.kill()
    await wait_for(llm, "recovering")
    await wait_for(llm, state)


@pytest.mark.parametrize("num_deaths", [1, 5])
async def test_nobody_is_blamed_for_engines_that_die_while_paused(num_deaths: int, autojump_clock: MockClock) -> None:
    async with open_fake_llm() as llm:
        expected = [whole(await ask(llm, f"prompt {i}", PARAMS)) for i in range(3)]
    results: dict[int, object] = {}
    async with open_fake_llm(**restarting()) as llm:

        async def run(number: int) -> None:
            results[number] = whole(await ask(llm, f"prompt {number}", PARAMS))

        await llm.pause_generation(mode="keep")
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(run, number)
            for _ in range(num_deaths):
                await die(llm)
            assert await llm.is_paused()
            assert not results
            await llm.resume_generation()
        await llm.assert_idle()

    assert [results[number] for number in range(3)] == expected


@pytest.mark.parametrize("num_deaths", [1, 5])
async def test_nobody_is_blamed_for_engines_that_die_asleep(num_deaths: int, autojump_clock: MockClock) -> None:
    async with open_fake_llm() as llm:
        expected = whole(await ask(llm, "prompt", PARAMS))
    async with open_fake_llm(**restarting()) as llm:
        results: list[object] = []

        async def run() -> None:
            results.append(whole(await ask(llm, "prompt", PARAMS)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            with trio.fail_after(FOREVER_S):
                while not llm.num_running:  # noqa: ASYNC110 - nothing says so, and the clock is a mock
                    await trio.sleep(0.001)
            await llm.sleep(1)
            for _ in range(num_deaths):
                await die(llm, "asleep")
            assert await llm.is_sleeping()
            await llm.wake_up()
        await llm.assert_idle()

    assert results == [expected]


async def test_a_pause_that_waits_goes_on_waiting_for_the_same_requests_in_the_next_engine(
    autojump_clock: MockClock,
) -> None:
    async with open_fake_llm() as llm:
        expected = whole(await ask(llm, "prompt", PARAMS))
    order: list[str] = []
    async with open_fake_llm(**restarting()) as llm:

        async def run(name: str, started: Callable[[], None]) -> None:
            with trio.fail_after(FOREVER_S):
                async with llm.generate("prompt", PARAMS) as stream:
                    outputs = []
                    async for output in stream:
                        outputs.append(output)
                        started()
            assert whole(outputs) == expected
            order.append(name)

        async def pause() -> None:
            await llm.pause_generation(mode="wait")
            counts = await llm.check_scheduler()
            assert counts["num_running"] + counts["num_waiting"] == 1, "the new one alone is left"
            order.append("paused")

        async with trio.open_nursery() as nursery:
            has_begun = trio.Event()
            nursery.start_soon(run, "old", has_begun.set)
            await has_begun.wait()
            nursery.start_soon(pause)
            with trio.fail_after(FOREVER_S):
                while not await llm.is_paused():  # noqa: ASYNC110 - nothing says so, and the clock is a mock
                    await trio.sleep(0.001)
            nursery.start_soon(run, "new", lambda: None)
            await die(llm)
            with trio.fail_after(FOREVER_S):
                while "paused" not in order:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            assert sorted(order) == ["old", "paused"]
            await llm.resume_generation()
        await llm.assert_idle()


async def test_a_call_that_every_engine_dies_of_ends_with_an_error_and_the_engine_goes_on(
    autojump_clock: MockClock,
) -> None:
    async with open_fake_llm(answer="Hi", **restarting()) as llm:
        num_calls = 0

        def die_of_it(*_: object, **__: object) -> None:
            nonlocal num_calls
            num_calls += 1
            raise DeviceLostError("device lost in this call")

        # The device is the same for all incarnations of a FakeLLM.
        llm._executor.move = die_of_it  # type: ignore[method-assign]
        with trio.fail_after(FOREVER_S), pytest.raises(EngineGenerateError, match="engines die of this call: 2 did"):
            await llm.sleep(1)
        await wait_for(llm, "ready")
        assert num_calls == 2
        assert (await llm.complete("Hello")).outputs[0].text == "Hi"
        await llm.assert_idle()


async def test_an_engine_that_dies_before_the_tokenizer_is_loaded_is_recovered_from(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = FakeLLM._load_renderer

    async def load_slowly(llm: FakeLLM, model: ModelConfig) -> Renderer:
        await trio.sleep(10)
        return await load(llm, model)

    monkeypatch.setattr(FakeLLM, "_load_renderer", load_slowly)
    async with open_fake_llm(answer="Hi", wait_until_ready=False, **restarting()) as llm:
        await trio.sleep(1)
        llm.kill()
        await llm.wait_until_ready()
        with trio.fail_after(FOREVER_S):
            await llm.check_health()
            assert (await llm.complete("Hello")).outputs[0].text == "Hi"


class BusyEngine:
    """An engine that always owes an answer. Implements `Watched`."""

    num_expected = 1
    is_under_control = False

    def __init__(self, stall_timeout_s: float) -> None:
        self.killed: list[str] = []
        self.monitor = EngineMonitor(EngineConfig(stall_timeout_s=stall_timeout_s), self)
        self.monitor.is_ready = True

    def kill(self, reason: str) -> None:
        self.killed.append(reason)


@pytest.mark.parametrize("timeout_s", [2.0, 120.0])
async def test_a_front_end_that_was_stopped_does_not_blame_the_engine(timeout_s: float, mock_clock: MockClock) -> None:
    engine = BusyEngine(timeout_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.monitor.watch)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(10_000)
        await trio.testing.wait_all_tasks_blocked()

        assert engine.killed == [], "nobody had a turn to read what the engine said"
        engine.monitor.record_life()
        engine.monitor.record_step()
        mock_clock.jump(0.6)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.killed == []
        nursery.cancel_scope.cancel()


async def test_an_engine_that_says_nothing_after_that_is_killed_all_the_same(mock_clock: MockClock) -> None:
    engine = BusyEngine(120.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.monitor.watch)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(60):
            mock_clock.jump(5)
            await trio.testing.wait_all_tasks_blocked()
        assert len(engine.killed) == 1
        engine.monitor.mark_dead(EngineDeadError("over"))


async def test_cancelling_the_watch_leaves_the_engine_alone(mock_clock: MockClock) -> None:
    engine = BusyEngine(120.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(engine.monitor.watch))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert engine.killed == []
    assert engine.monitor.dead_error is None
