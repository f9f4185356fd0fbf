"""Several engines behind one front end, in memory: balanced by their work, and requests that outlive engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.frontend.test_recovery import REQUESTS, restarting, undisturbed, wait_for, whole
from tests.support.asking import ask
from tests.support.request_checks import open_checked_llm
from trio_llm import SamplingParams
from trio_llm.errors import EngineDeadError, EngineStartupError, EngineUnavailableError, InvalidRequestError
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.pooling import PoolingParams
from trio_llm.testing import FakeLLM, open_fake_llm
from trio_llm.wire.messages import SchedulerStats

STEP_S = 0.01


# ------------------------------------------------------------------------------------ balance


def works(llm: FakeLLM) -> list[int]:
    """What each engine still has to do, counted now."""
    sums = [0] * len(llm.cores)
    for request in llm._registry.in_flight.values():
        sums[request.engine_index] += request.measure_work()
    return sums


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
async def test_512_equal_long_requests_keep_two_engines_equally_busy(gap_s: float, autojump_clock: MockClock) -> None:
    ratios: list[float] = []
    num_done = 0

    async def read(llm: FakeLLM) -> None:
        nonlocal num_done
        await llm.complete([65] * 64, max_tokens=100, ignore_eos=True)
        num_done += 1

    async def watch(llm: FakeLLM) -> None:
        while num_done < 512:
            await trio.sleep(0.05)
            busy = works(llm)
            # Requests are not divided, and the last batch ends on one engine before it does on the other.
            if min(busy) > 16 * 100 * 8:
                ratios.append(max(busy) / min(busy))

    async with open_fake_llm(
        num_engines=2, step_s=0.05, enable_prefix_affinity=False, num_gpu_blocks_override=4096
    ) as llm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, llm)
            for _ in range(512):
                nursery.start_soon(read, llm)
                if gap_s:
                    await trio.sleep(gap_s)
        await llm.assert_idle()

    assert len(ratios) > 100
    assert max(ratios) <= 1.3


class CountComputed(StatLogger):
    """Prompt tokens that engines computed."""

    def __init__(self) -> None:
        self.num_tokens: Counter[int] = Counter()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        self.num_tokens[engine_index] += iteration.num_prompt_tokens - iteration.num_cached_tokens


async def count_computed(**settings: Any) -> Counter[int]:
    """Prompt tokens by rank, for 192 prompts that begin with one of 8 texts of 512 tokens, and go on with 32 others."""
    counter = CountComputed()
    settings = {"num_gpu_blocks_override": 4096, "step_s": 0.02, "stat_loggers": [counter], **settings}
    async with open_fake_llm(**settings) as llm:
        async with trio.open_nursery() as nursery:
            dice = Random(3)
            for number in range(192):
                prompt = [65 + dice.randrange(8)] * 512 + [number] * 32
                nursery.start_soon(partial(llm.complete, prompt, max_tokens=40, ignore_eos=True))
                await trio.sleep(0.05)
        await llm.assert_idle()
    return counter.num_tokens


async def test_shared_beginnings_are_hardly_computed_more_often_than_by_one_engine(autojump_clock: MockClock) -> None:
    alone = await count_computed()
    with_affinity = await count_computed(num_engines=2)
    without = await count_computed(num_engines=2, enable_prefix_affinity=False)

    assert with_affinity.total() <= 1.2 * alone.total()
    assert without.total() > 1.2 * alone.total(), "else this test could not fail"
    assert min(with_affinity.values()) > 0.25 * with_affinity.total(), "no engine is idle"


# ------------------------------------------------------------------------------------ ranks and sessions


async def test_a_request_says_which_rank_or_which_session_it_wants(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=3, answer="Hi", step_s=STEP_S) as llm:

        async def rank_of(**routing: Any) -> int:
            async with llm.generate("Hello", request_id="one", **routing) as stream:
                async for _ in stream:
                    pass
            return llm.requests[-1].rank

        assert [await rank_of(data_parallel_rank=rank) for rank in (2, 0, 1, 2)] == [2, 0, 1, 2]
        assert await rank_of(session_id="s", data_parallel_rank=1) == 1
        assert [await rank_of(session_id="s") for _ in range(3)] == [1, 1, 1]
        assert await rank_of(session_id="other") == 0
        for rank in (3, -1, 10**30):
            with pytest.raises(InvalidRequestError, match="data_parallel_rank must be from 0 to 2"):
                await rank_of(data_parallel_rank=rank)


async def test_vectors_go_to_their_rank_too(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=2) as llm:
        await llm.encode("Hello", PoolingParams(), data_parallel_rank=1)
        await llm.encode("Hello", PoolingParams(), data_parallel_rank=1, session_id="s")
        await llm.encode("Hello", PoolingParams(), session_id="s")

        assert [request.rank for request in llm.requests] == [1, 1, 1]
        with pytest.raises(InvalidRequestError):
            await llm.encode("Hello", PoolingParams(), data_parallel_rank=2)


async def test_a_streamed_chat_and_a_session_of_inputs_go_to_their_rank(autojump_clock: MockClock) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("Hello")
        yield StreamingInput("again")

    async with open_checked_llm(num_engines=2, answer="Hi") as llm:
        messages = [{"role": "user", "content": "Hello"}]
        async with llm.stream_chat(messages, data_parallel_rank=1) as chat:
            async for _ in chat:
                pass
        async with llm.generate(inputs(), SamplingParams(max_tokens=2), data_parallel_rank=1) as stream:
            async for _ in stream:
                pass

        assert [request.rank for request in llm.requests] == [1, 1]


async def test_the_front_end_of_one_rank_is_known_by_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    counter = CountComputed()
    async with open_checked_llm(
        answer="Hi", data_parallel_size=4, data_parallel_rank=2, data_parallel_external_lb=True,
        stat_loggers=[counter], kv_events=True, **restarting(),
    ) as llm:  # fmt: skip
        async with llm.kv_events() as batches:
            await llm.complete("Hello" * 20)
            assert (await anext(batches)).engine_index == 2
            async with llm.generate("Hello", data_parallel_rank=2) as stream:
                async for _ in stream:
                    pass
            with pytest.raises(InvalidRequestError, match="must be 2, the only rank of this server"):
                async with llm.generate("Hello", data_parallel_rank=1):
                    pass
            llm.kill()
            await wait_for(llm, "recovering")
            await wait_for(llm, "ready")
            assert (await anext(batches)).engine_index == 2

        assert counter.num_tokens.keys() == {2}
        assert "engine 2 is ready again" in caplog.text


async def test_a_rank_that_is_gone_takes_no_requests_and_the_others_do(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=2, answer="Hi") as llm:
        llm.kill(engine=1)
        await trio.sleep(1)

        assert llm.status.state == "ready"
        await llm.check_health()
        assert (await llm.complete("Hello")).finished
        with pytest.raises(EngineUnavailableError, match="data_parallel_rank 1 is gone"):
            async with llm.generate("Hello", data_parallel_rank=1):
                pass


# ------------------------------------------------------------------------------------ deaths


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return trio.run(undisturbed)


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("step", range(0, 40, 2))
async def test_at_whichever_step_an_engine_dies_all_streams_go_on_with_the_same_tokens(
    step: int, for_good: bool, expected: list[Any], autojump_clock: MockClock
) -> None:
    results: dict[int, Any] = {}
    async with open_checked_llm(num_engines=2, **restarting(max_num_seqs=4)) as llm:

        async def run(number: int) -> None:
            results[number] = whole(await ask(llm, *REQUESTS[number]))

        async with trio.open_nursery() as nursery:
            for number in range(len(REQUESTS)):
                nursery.start_soon(run, number)
            await trio.sleep(step * STEP_S + STEP_S / 2)
            llm.kill(engine=step // 2 % 2, for_good=for_good)
        await llm.assert_idle()

        assert [engine.is_dead for engine in llm._engines].count(True) == for_good

    assert [results[number] for number in range(len(REQUESTS))] == expected


@pytest.mark.parametrize("period_s", [0.03, 0.07, 0.15])
async def test_engines_that_die_in_turn_cost_no_reader_a_token(
    period_s: float, expected: list[Any], autojump_clock: MockClock
) -> None:
    results: dict[int, Any] = {}
    async with open_checked_llm(num_engines=3, **restarting()) as llm:

        async def run(number: int) -> None:
            results[number] = whole(await ask(llm, *REQUESTS[number]))

        async with trio.open_nursery() as nursery:
            for number in range(len(REQUESTS)):
                nursery.start_soon(run, number)
            for number in range(12):
                await trio.sleep(period_s)
                llm.kill(engine=number % 3)
        await llm.assert_idle()

    assert [results[number] for number in range(len(REQUESTS))] == expected


async def test_a_session_goes_on_with_another_engine_between_its_inputs_and_within(autojump_clock: MockClock) -> None:
    async def talk(kill_after: int | None) -> list[str]:
        num_inputs, texts = 0, [""]

        async with open_checked_llm(num_engines=2, **restarting()) as llm:

            async def inputs() -> AsyncIterator[StreamingInput]:
                nonlocal num_inputs
                for number in range(4):
                    num_inputs = number
                    if number == kill_after:
                        llm.kill(engine=0, for_good=True)
                        await trio.sleep(0.1)
                    yield StreamingInput(f"input {number}")

            params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
            async with llm.generate(inputs(), params) as stream:
                async for output in stream:
                    texts[-1] += output.outputs[0].text
                    if output.outputs[0].finish_reason:
                        texts.append("")
                    elif kill_after == 10 and len(texts) == 3 and len(texts[-1]) == 5:
                        llm.kill(engine=0, for_good=True)
            await llm.assert_idle()
            assert llm.requests[0].rank == (0 if kill_after is None else 1)
        return texts

    assert await talk(2) == await talk(10) == await talk(None)


async def test_a_rank_that_comes_back_takes_part_again(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=2, **restarting()) as llm:
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        async with llm.generate("Hello", params) as first, llm.generate("Hello", params, session_id="s") as second:
            await anext(first)
            await anext(second)
            llm.kill(engine=0)
            await trio.sleep(0.1)

            assert [request.engine_index for request in llm._registry.in_flight.values()] == [1, 1]
            assert [engine.is_up for engine in llm._engines] == [False, True]

            await trio.sleep(1)
            assert [engine.is_up for engine in llm._engines] == [True, True]
            await llm.complete("another", max_tokens=2)
            assert llm.requests[-1].rank == 0


async def test_no_request_is_lost_or_run_twice_when_the_last_engine_goes(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=2, step_s=STEP_S) as llm:
        async with llm.generate("Hello", SamplingParams(max_tokens=4000, ignore_eos=True)) as stream:
            await anext(stream)
            llm.kill("the first", engine=0)
            await trio.sleep(0.1)
            num_running = llm.cores[1].core.stats.num_running
            llm.kill("the second", engine=1)
            with pytest.raises(EngineDeadError, match="the second"):
                async for _ in stream:
                    pass
        assert num_running == 1, "it had moved"
        assert llm.dead_error is not None
        assert len(llm._registry) == 0


async def test_an_engine_that_stalls_is_killed_and_its_requests_move(autojump_clock: MockClock) -> None:
    async with open_checked_llm(num_engines=2, answer="Hi", **restarting(stall_timeout_s=3.0)) as llm:
        llm.stall(engine=0)
        with trio.fail_after(10):
            output = await llm.complete("Hello")

        assert output.outputs[0].text == "Hi"
        assert llm.requests[0].rank == 1


async def test_restarts_can_be_forbidden(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**restarting(max_engine_restarts=0)) as llm, llm.generate("Hello") as stream:
        llm.kill("lost")
        with pytest.raises(EngineDeadError, match=r"lost; it is not started again \(--max-engine-restarts 0\)"):
            async for _ in stream:
                pass


async def test_an_engine_that_cannot_start_ends_the_start_of_all_without_waiting_for_the_others(
    autojump_clock: MockClock,
) -> None:
    async with open_fake_llm(num_engines=2, wait_until_ready=False, on_engine_death="restart") as llm:
        for core in llm.cores:
            core._outbox.clear()  # they never come to say that they are ready
            core._has_output = trio.Event()
        llm.kill("no memory", engine=1)

        with trio.fail_after(5), pytest.raises(EngineStartupError, match="no memory"):
            await llm.wait_until_ready()

        assert llm.status.state == "dead"
