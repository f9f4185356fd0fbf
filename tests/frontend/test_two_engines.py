"""AsyncLLM over two engines behind the in-memory link: each has its own life, and a front end gets along with both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tests.support.request_checks import checked_requests
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.frontend.core_client.restarting import RestartingClient
from trio_llm.frontend.kv_events import KVEventHub
from trio_llm.frontend.open_llm import open_tasks
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.sampling import SamplingParams
from trio_llm.testing.answers import END, LOGITS_WIDTH, MODEL_DIR, AnsweringExecutor
from trio_llm.testing.in_memory import InMemoryCoreClient
from trio_llm.wire.messages import AllBlocksCleared, EngineCoreOutputs, EngineCoreRequest, ModelConfig, SchedulerStats

NUM_ENGINES = 2
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


class Loggers(StatLogger):
    """Remembers which engine each record is about."""

    def __init__(self) -> None:
        self.tokens = [0] * NUM_ENGINES
        self.restarts = [0] * NUM_ENGINES

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        self.tokens[engine_index] += iteration.num_generation_tokens
        self.restarts[engine_index] += iteration.num_restarts


class TwoEngines(AsyncLLM):
    """Both run the same fake model. Letters follow from the prompt, so that answers do not depend on the engine."""

    def __init__(self, config: EngineConfig, loggers: Loggers) -> None:
        self.cores: dict[int, InMemoryCoreClient] = {}
        """The newest incarnation's link by the engine's index."""
        self.prompts: list[list[str]] = [[] for _ in range(NUM_ENGINES)]
        """Internal ids of the requests that each engine was sent, in order."""
        clients: list[CoreClient] = []
        for index in range(NUM_ENGINES):
            make: Callable[[int], InMemoryCoreClient] = partial(self._make, index, config)
            restarts = config.on_engine_death == "restart"
            clients.append(RestartingClient(make, RestartPolicy(5)) if restarts else make(1))
        super().__init__(clients, config, [loggers], keep_alive_on_engine_death=False)

    def _make(self, index: int, config: EngineConfig, epoch: int) -> InMemoryCoreClient:
        fake = FakeEngineConfig(logits_width=LOGITS_WIDTH, eos_token_ids=(END,))
        executor = AnsweringExecutor(fake, num_blocks=128)
        core = InMemoryCoreClient(executor, config, step_s=0.1, epoch=epoch, engine_index=index)

        def note(message: object) -> None:
            if isinstance(message, EngineCoreRequest):
                self.prompts[index].append(message.request_id)

        core.on_sent = note
        self.cores[index] = core
        return core

    async def _load_renderer(self, model: ModelConfig) -> Renderer:
        return Renderer.load(MODEL_DIR, model.max_model_len, logits_width=LOGITS_WIDTH)


@asynccontextmanager
async def open_two(**settings: object) -> AsyncIterator[tuple[TwoEngines, Loggers]]:
    loggers = Loggers()
    llm = TwoEngines(EngineConfig(**{"on_engine_death": "restart", **settings}), loggers)  # type: ignore[arg-type]
    async with open_tasks(llm):
        with checked_requests(llm):
            yield llm, loggers


async def read(llm: AsyncLLM, prompt: list[int], texts: dict[int, str]) -> None:
    async with llm.generate(prompt, LONG) as stream:
        text = ""
        async for output in stream:
            text += output.outputs[0].text
    texts[prompt[-1]] = text


async def expected_texts() -> dict[int, str]:
    texts: dict[int, str] = {}
    async with open_two() as (llm, _):
        for number in range(4):
            await read(llm, [65, 66 + number], texts)
    return texts


async def test_requests_are_shared_out_and_each_engine_has_its_own_statistics(autojump_clock: MockClock) -> None:
    texts: dict[int, str] = {}
    async with open_two() as (llm, loggers):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read, llm, [65, 66 + number], texts)
        await llm.wait_idle()

        assert [len(prompts) for prompts in llm.prompts] == [2, 2]
        assert loggers.tokens == [800, 800]
        counts = await llm.check_scheduler()
        assert counts["num_free_blocks"] == counts["num_blocks"] == 2 * 128

    assert texts == await expected_texts()


async def test_one_engine_that_dies_is_recovered_while_the_other_goes_on(autojump_clock: MockClock) -> None:
    texts: dict[int, str] = {}
    async with open_two() as (llm, loggers):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(read, llm, [65, 66 + number], texts)
            await trio.sleep(5)
            llm.cores[0].kill("killed by the test")
            await trio.sleep(0.2)

            assert llm.status.state == "ready", "the other engine takes requests"
            assert [engine.is_up for engine in llm._engines] == [False, True]
            await llm.check_health()

        await llm.check_health()
        assert (await llm.complete([65], max_tokens=3, ignore_eos=True)).finished
        assert loggers.restarts == [1, 0]
        assert [len(prompts) for prompts in llm.prompts] == [3, 4], "what the dead one had moved to the other one"

    assert texts == await expected_texts()


async def test_two_engines_that_are_busy_are_asked_at_the_same_time(autojump_clock: MockClock) -> None:
    async with open_two() as (llm, _), trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(read, llm, [65, 66 + number], {})
        await trio.sleep(1)
        for core in llm.cores.values():
            core.pause()
        began_s = trio.current_time()

        await llm.check_health()

        assert trio.current_time() - began_s < 1.5
        for core in llm.cores.values():
            core.resume()


async def test_the_requests_of_an_engine_that_is_gone_for_good_go_on_with_the_other(autojump_clock: MockClock) -> None:
    async with open_two(on_engine_death="exit") as (llm, _):
        async with llm.generate([65], LONG) as first, llm.generate([66], LONG) as second:
            assert [request.engine_index for request in llm._registry.in_flight.values()] == [0, 1]
            await anext(first)
            llm.cores[0].kill("killed by the test")
            for stream in (first, second):
                async for output in stream:
                    last = output
                assert last.finished

        assert llm.dead_error is None
        assert llm.status.state == "ready"
        for _ in range(3):
            assert (await llm.complete([65], max_tokens=3, ignore_eos=True)).finished
        assert [len(prompts) for prompts in llm.prompts] == [1, 5], "no new request goes to an engine that is gone"

        async with llm.generate([65], LONG) as last_one:
            llm.cores[1].kill("killed by the test, too")
            with pytest.raises(EngineDeadError):
                async for _ in last_one:
                    pass
        assert "killed by the test" in str(await llm.wait_dead())
        assert llm.dead_error is not None


async def test_control_calls_reach_both_and_a_restarted_one_is_brought_to_the_same_state(
    autojump_clock: MockClock,
) -> None:
    async with open_two() as (llm, _):
        await llm.sleep()
        assert [core.core._control_calls.state.may_step for core in llm.cores.values()] == [False, False]
        with pytest.raises(EngineUnavailableError):
            llm.check_admission()
        llm.cores[1].kill("killed in its sleep")
        await trio.sleep(30)

        assert [engine.num_restarts for engine in llm._engines] == [0, 1]
        assert [core.core._control_calls.state.may_step for core in llm.cores.values()] == [False, False]

        await llm.wake_up()
        assert (await llm.complete([65], max_tokens=3, ignore_eos=True)).finished
        assert await llm.collective_rpc("model_info")
        assert len(await llm.collective_rpc("model_info")) == NUM_ENGINES


async def test_kv_events_say_whose_cache_they_are_about(autojump_clock: MockClock) -> None:
    async with open_two(kv_events=True) as (llm, _), llm.kv_events() as batches:
        for number in range(NUM_ENGINES):
            async with trio.open_nursery() as nursery:  # both at once, so that each engine gets one
                nursery.start_soon(read, llm, [65 + number] * 64, {})
                nursery.start_soon(read, llm, [75 + number] * 64, {})
        seen = set()
        with trio.move_on_after(1):
            async for batch in batches:
                seen.add(batch.engine_index)
        assert seen == {0, 1}

        llm.cores[1].kill("killed by the test")
        batch = await anext(batches)

        assert (batch.engine_index, batch.events) == (1, [AllBlocksCleared()])


async def test_control_calls_go_on_with_the_engines_that_are_left(autojump_clock: MockClock) -> None:
    async with open_two(on_engine_death="exit") as (llm, _):
        llm.cores[0].kill("killed by the test")
        with trio.fail_after(60):
            await llm._engines[0].monitor.wait_dead()

        await llm.sleep()
        assert llm.status.state == "asleep"
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert (await llm.check_scheduler())["num_blocks"] == 128
        assert (await llm.complete([65], max_tokens=3, ignore_eos=True)).finished


async def test_an_engine_that_dies_for_good_in_a_call_does_not_undo_it_on_the_others(autojump_clock: MockClock) -> None:
    async with open_two(on_engine_death="exit") as (llm, _):
        llm.cores[0].pause()  # it does not answer
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.sleep)
            await trio.testing.wait_all_tasks_blocked()
            llm.cores[0].kill("killed in the call")

        assert llm.status.state == "asleep"
        with pytest.raises(EngineUnavailableError, match="sleeps"):
            llm.check_admission()


async def test_health_is_that_of_the_engine_that_is_started_again(autojump_clock: MockClock) -> None:
    async with open_two() as (llm, _):
        llm.cores[0].kill("killed for good")
        llm._engines[0].core.kill("killed for good", for_good=True)
        with trio.fail_after(60):
            await llm._engines[0].monitor.wait_dead()
        llm.cores[1].kill("killed, and started again")
        with trio.fail_after(60):
            while llm.status.state != "recovering":  # noqa: ASYNC110 - nothing says so, and the clock is a mock
                await trio.sleep(0.01)

        with pytest.raises(EngineUnavailableError, match="started again"):
            await llm.check_health()


async def test_the_blocks_of_all_engines_are_counted_once(autojump_clock: MockClock) -> None:
    async with open_two() as (llm, _):
        assert (llm.statistics().num_kv_blocks, llm.statistics().num_free_kv_blocks) == (256, 256)


async def test_an_engine_that_starts_again_is_said_to_have_cleared_its_cache_at_its_own_time(
    autojump_clock: MockClock,
) -> None:
    hub = KVEventHub(NUM_ENGINES)
    async with open_two() as (llm, _), hub.subscribe(4) as batches:
        for index, timestamp in ((0, 5.0), (1, 70.0)):
            hub.put(EngineCoreOutputs(1, 1, timestamp, kv_events=[AllBlocksCleared()], engine_index=index))
        hub.on_lost(llm._engines[0], "killed")
        hub.on_lost(llm._engines[1], "killed")

        seen = [await anext(batches) for _ in range(4)]
        assert [(batch.engine_index, batch.timestamp) for batch in seen] == [(0, 5.0), (1, 70.0)] * 2
