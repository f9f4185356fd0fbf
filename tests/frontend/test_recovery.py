"""Recovery: engines die in every way, at every moment, and readers get the very tokens of an engine that does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.support.asking import ask
from tests.support.request_checks import open_checked_llm
from trio_llm import RequestOutputKind, SamplingParams
from trio_llm.errors import EngineDeadError, EngineGenerateError, EngineUnavailableError
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.outputs import RequestOutput
from trio_llm.testing import FakeLLM

FOREVER_S = 100_000.0
"""By the mock clock."""


def restarting(**more: Any) -> dict[str, Any]:
    return {"on_engine_death": "restart", "step_s": 0.01, "max_engine_restarts": 100, **more}


def whole(outputs: list[RequestOutput]) -> dict[int, tuple[list[int], str, int, str | None]]:
    """Per choice: ids, text, number of log-probabilities, finish reason."""
    found: dict[int, tuple[list[int], str, int, str | None]] = {}
    for output in outputs:
        for choice in output.outputs:
            ids, text, logprobs, _ = found.get(choice.index, ([], "", 0, None))
            found[choice.index] = (
                ids + choice.token_ids,
                text + choice.text,
                logprobs + len(choice.logprobs or ()),
                choice.finish_reason,
            )
    return found


REQUESTS = [
    ("greedy", SamplingParams(temperature=0, max_tokens=30)),
    ("sampled", SamplingParams(seed=3, max_tokens=40)),
    ("with log-probabilities", SamplingParams(seed=4, max_tokens=25, logprobs=2)),
    ("with a stop string", SamplingParams(seed=5, max_tokens=200, stop=("e",), include_stop_str_in_output=True)),
    ("three choices", SamplingParams(seed=6, max_tokens=20, n=3)),
    ("scored", SamplingParams(seed=7, max_tokens=10, prompt_logprobs=1)),
    ("at least ten", SamplingParams(seed=8, max_tokens=30, min_tokens=10)),
]


async def undisturbed() -> list[dict[int, tuple[list[int], str, int, str | None]]]:
    async with open_checked_llm() as llm:
        return [whole(await ask(llm, prompt, params)) for prompt, params in REQUESTS]


@pytest.mark.parametrize("fault", ["kill", "drop", "stall"])
@pytest.mark.parametrize("period_s", [0.03, 0.07, 0.15])
async def test_no_reader_loses_or_repeats_a_token_however_often_engines_fail(
    fault: str, period_s: float, autojump_clock: MockClock
) -> None:
    expected = await undisturbed()
    results: dict[int, dict[int, tuple[list[int], str, int, str | None]]] = {}
    async with open_checked_llm(**restarting(stall_timeout_s=5.0)) as llm:

        async def run(number: int) -> None:
            results[number] = whole(await ask(llm, *REQUESTS[number]))

        async def disturb() -> None:
            for _ in range(4):
                await trio.sleep(period_s)
                if len(results) == len(REQUESTS):
                    return
                {"kill": llm.kill, "drop": llm.drop_next_frame, "stall": llm.stall}[fault]()
                if fault == "kill":
                    await wait_for(llm, "recovering")
                    await wait_for(llm, "ready")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            for number in range(len(REQUESTS)):
                nursery.start_soon(run, number)

        assert llm.statistics().num_restarts > 0
        await llm.assert_idle()

    assert [results[number] for number in range(len(REQUESTS))] == expected


async def test_a_request_that_comes_while_there_is_no_engine_waits_for_the_next(autojump_clock: MockClock) -> None:
    async with open_checked_llm(answer="Hi", **restarting()) as llm:
        llm.kill()
        await wait_for(llm, "recovering")

        output = await llm.complete("Hello")

        assert output.outputs[0].text == "Hi"


async def wait_for(llm: FakeLLM, state: str) -> None:
    with trio.fail_after(FOREVER_S):
        while llm.status.state != state:  # noqa: ASYNC110 - no event says so, and the clock is a mock
            await trio.sleep(0.01)


async def test_a_reader_that_leaves_while_there_is_no_engine_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**restarting()) as llm:
        async with llm.generate("Hello", SamplingParams(n=2, seed=1)) as stream:
            await anext(stream)
            llm.kill()
            await wait_for(llm, "recovering")
        async with llm.generate("never sent"):
            pass
        await llm.wait_idle()
        await wait_for(llm, "ready")
        await llm.assert_idle()
        assert [request.prompt for request in llm.requests].count("never sent") == 0


async def test_the_status_tells_why_the_engine_is_started_again_and_health_says_no_until_it_is(
    autojump_clock: MockClock,
) -> None:
    async with open_checked_llm(**restarting()) as llm:
        llm.kill("the device is lost")
        await wait_for(llm, "recovering")
        assert "the device is lost" in (llm.status.reason or "")
        with pytest.raises(EngineUnavailableError, match="the device is lost"):
            await llm.check_health()
        await wait_for(llm, "ready")
        await llm.check_health()


async def test_when_no_restart_is_left_every_reader_gets_what_it_is_owed_then_the_root_cause(
    autojump_clock: MockClock,
) -> None:
    async with open_checked_llm(**restarting(max_engine_restarts=1)) as llm:
        async with llm.generate("Hello") as stream:
            await anext(stream)
            for _ in range(2):
                await wait_for(llm, "ready")
                llm.kill("the device is lost")
                await trio.sleep(0.1)
            with pytest.raises(EngineDeadError, match=r"device is lost.*1 times.*--max-engine-restarts"):
                while True:
                    await anext(stream)
        with pytest.raises(EngineDeadError):
            await llm.complete("Hello")
        await llm.assert_idle()


async def test_a_request_that_kills_every_engine_ends_with_an_error_and_its_neighbours_do_not(
    autojump_clock: MockClock,
) -> None:
    params = SamplingParams(seed=1, max_tokens=20)
    async with open_checked_llm() as llm:
        expected = [whole(await ask(llm, f"neighbour {i}", params)) for i in range(15)]
    results: dict[int, object] = {}
    async with open_checked_llm(**restarting(killer_prompt=ord("!"))) as llm:

        async def run(number: int) -> None:
            results[number] = whole(await ask(llm, f"neighbour {number}", params))

        async def run_the_killer() -> None:
            with pytest.raises(EngineGenerateError, match="engines die of this request"):
                await ask(llm, "! boom", params)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_the_killer)
            for number in range(15):
                nursery.start_soon(run, number)
        assert llm.statistics().num_restarts == 3
        await llm.assert_idle()
        assert (await llm.complete("after")).finished

    assert [results[number] for number in range(15)] == expected


async def test_a_session_goes_on_in_another_engine_with_the_same_tokens(autojump_clock: MockClock) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)

    async def converse(llm: FakeLLM, kills: set[str]) -> list[list[int]]:
        async def inputs() -> AsyncIterator[StreamingInput]:
            for i in range(4):
                if f"before {i}" in kills:
                    llm.kill()
                    await wait_for(llm, "recovering")
                yield StreamingInput(f"input {i}")

        answers: list[list[int]] = [[]]
        with trio.fail_after(FOREVER_S):
            async with llm.generate(inputs(), params) as stream:
                async for output in stream:
                    answers[-1] += output.outputs[0].token_ids
                    if len(answers[-1]) == 5 and f"during {len(answers) - 1}" in kills:
                        llm.kill()
                    if output.outputs[0].finish_reason and not output.finished:
                        answers.append([])
        await llm.assert_idle()
        return answers

    async with open_checked_llm(step_s=0.01) as llm:
        expected = await converse(llm, set())
    for kills in ({"before 0"}, {"before 2"}, {"during 0"}, {"during 1", "during 3"}, {"before 1", "during 1"}):
        async with open_checked_llm(**restarting()) as llm:
            assert await converse(llm, kills) == expected


async def test_an_engine_that_says_nothing_is_killed_after_the_stall_timeout_also_when_idle(
    autojump_clock: MockClock,
) -> None:
    async with open_checked_llm(**restarting(stall_timeout_s=20.0)) as llm:
        await trio.sleep(1000)
        assert llm.statistics().num_restarts == 0, "an idle engine does not stall"
        llm.stall()
        await trio.sleep(15)
        assert llm.status.state == "stalled"
        await wait_for(llm, "recovering")
        assert "--stall-timeout 20" in (llm.status.reason or "")
        await wait_for(llm, "ready")
        assert (await llm.complete("Hello", SamplingParams(max_tokens=2))).finished


async def test_an_engine_whose_steps_are_longer_than_the_stall_timeout_is_the_only_busy_one_that_is_killed(
    autojump_clock: MockClock,
) -> None:
    for step_s, num_restarts in ((15.0, 0), (25.0, 1)):
        async with open_checked_llm(**restarting(stall_timeout_s=20.0)) as llm:
            llm.slow(step_s)
            async with llm.generate("Hello") as stream:
                with trio.move_on_after(24):
                    while True:
                        await anext(stream)
            assert llm.statistics().num_restarts == num_restarts or llm.status.state == "recovering"


async def test_the_last_frame_of_all_is_missed_too(autojump_clock: MockClock) -> None:
    async with open_checked_llm(answer="Hi", **restarting()) as llm:
        async with llm.generate("Hello") as stream:
            text = (await anext(stream)).outputs[0].text
            await trio.sleep(0.005)
            llm.drop_next_frame()
            with trio.fail_after(FOREVER_S):
                text += "".join([output.outputs[0].text async for output in stream])
        assert text == "Hi"
        assert llm.statistics().num_restarts == 1


async def test_a_call_that_waits_for_an_answer_gets_it_from_the_next_engine(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**restarting()) as llm:
        llm.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.is_sleeping)
            await trio.sleep(0.1)
            llm.kill()


async def test_a_look_at_the_health_of_an_engine_that_dies_meanwhile_finds_it_dead(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**restarting()) as llm:
        llm.stall()
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                with pytest.raises(EngineUnavailableError, match="killed by the test"):
                    await llm.check_health()

            nursery.start_soon(look)
            await trio.sleep(0.1)
            llm.kill()
        assert llm.status.state == "recovering"


async def test_a_deadline_goes_on_while_there_is_no_engine(autojump_clock: MockClock) -> None:
    async with open_checked_llm(max_num_seqs=1, **restarting()) as llm:
        async with llm.generate("first", SamplingParams(max_tokens=200)) as stream:
            await anext(stream)
            with trio.move_on_after(0.2) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, llm, "late", SamplingParams())
                    await trio.sleep(0.1)
                    llm.kill()
            assert scope.cancelled_caught
            async for _ in stream:
                pass
        await llm.assert_idle()


@settings(max_examples=15, deadline=None)
@given(kills_s=st.lists(st.floats(0, 1.5), max_size=5), kind=st.sampled_from(RequestOutputKind))
def test_deaths_at_any_time_change_no_output_kind(kills_s: list[float], kind: RequestOutputKind) -> None:
    params = SamplingParams(seed=1, max_tokens=50, n=2, output_kind=kind)

    async def last(disturbed: bool) -> list[tuple[int, list[int], str, str | None]]:
        async with open_checked_llm(**restarting()) as llm:

            async def disturb() -> None:
                for delay_s in kills_s if disturbed else ():
                    await trio.sleep(delay_s)
                    llm.kill()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                found = whole(await ask(llm, "Hello", params))
                nursery.cancel_scope.cancel()
            if kind is RequestOutputKind.CUMULATIVE:
                return []
            return [(index, ids, text, reason) for index, (ids, text, _, reason) in sorted(found.items())]

    assert trio.run(last, True, clock=MockClock(autojump_threshold=0)) == trio.run(
        last, False, clock=MockClock(autojump_threshold=0)
    )


async def test_loading_refuses_and_recovering_does_not(autojump_clock: MockClock) -> None:
    async with open_checked_llm(wait_until_ready=False, **restarting()) as llm:
        with pytest.raises(EngineUnavailableError):
            llm.check_admission()
        await llm.wait_until_ready()
        llm.kill()
        await wait_for(llm, "recovering")
        llm.check_admission()
