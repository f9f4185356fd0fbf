"""Recovery at odd moments: what waits, what is tried, what is reported, and what no restart can help."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.request_checks import open_checked_llm
from trio_llm import SamplingParams
from trio_llm.errors import EngineGenerateError, EngineStartupError, InvalidRequestError
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.testing import FakeLLM
from trio_llm.wire.messages import EngineCoreRequest, ModelConfig, ToEngine, UtilityCall

BOUND_S = 10_000.0
"""By the mock clock."""


def restarting(**more: Any) -> dict[str, Any]:
    return {"on_engine_death": "restart", "step_s": 0.01, "max_engine_restarts": 100, **more}


async def wait_for(llm: FakeLLM, state: str) -> None:
    with trio.fail_after(BOUND_S):
        while llm.status.state != state:  # noqa: ASYNC110 - no event says so, and the clock is a mock
            await trio.sleep(0.01)


async def lose_engine(llm: FakeLLM) -> None:
    llm.kill()
    await wait_for(llm, "recovering")
    await wait_for(llm, "ready")


async def test_a_tokenizer_that_cannot_be_read_is_an_error_at_once_and_no_reason_for_another_engine(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(llm: FakeLLM, model: ModelConfig) -> Renderer:
        raise EngineStartupError("the tokenizer is broken")

    monkeypatch.setattr(FakeLLM, "_load_renderer", fail)

    with trio.fail_after(BOUND_S), pytest.raises(EngineStartupError, match="the tokenizer is broken"):
        async with open_checked_llm(**restarting()):
            pytest.fail("it was opened")
    assert trio.current_time() < 0.5, "it was started again"


async def test_a_call_without_a_form_on_the_wire_is_refused_while_there_is_no_engine(autojump_clock: MockClock) -> None:
    async with open_checked_llm(answer="Hi", **restarting()) as llm:
        llm.kill()
        await wait_for(llm, "recovering")

        for call in (llm.collective_rpc("ping", [2**70]), llm.update_weights("/tmp", version="\ud800")):
            with pytest.raises(InvalidRequestError):
                await call

        assert (await llm.complete("Hello")).outputs[0].text == "Hi"
        await llm.assert_idle()


async def test_time_without_an_engine_counts_in_a_deadline_at_every_death(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines_s: list[float | None] = []

    def see(message: ToEngine) -> None:
        if isinstance(message, EngineCoreRequest) and message.prompt_token_ids == list(b"waits"):
            deadlines_s.append(message.deadline_s)

    async with open_checked_llm(**restarting()) as llm:
        monkeypatch.setattr(llm, "_remember", see)  # what each engine is sent
        await llm.pause_generation(mode="keep")
        with trio.move_on_after(60) as scope:
            async with llm.generate("waits"):
                began_s = trio.current_time()
                for _ in range(2):
                    await trio.sleep(10)
                    llm.kill()
                    await wait_for(llm, "recovering")
                    await wait_for(llm, "ready")
                    left_s = 60 - (trio.current_time() - began_s)
                    assert deadlines_s[-1] == pytest.approx(left_s, abs=0.1)
        assert not scope.cancelled_caught
        await llm.resume_generation()
        await llm.assert_idle()

    assert len(deadlines_s) == 2


async def test_a_request_that_is_given_up_counts_as_an_error(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**restarting(step_s=1.0)) as llm:
        async with llm.generate("poison", SamplingParams(n=2, seed=1, max_tokens=3)) as stream:
            for _ in range(3):
                await lose_engine(llm)
            with pytest.raises(EngineGenerateError, match="engines die of this request"):
                await anext(stream)

        finished = llm.statistics().num_finished
        assert (finished["error"], finished["abort"]) == (1, 1), "the one choice was tried, the other one ends with it"
        await llm.assert_idle()


async def test_a_suspect_that_is_dropped_for_its_deadline_does_not_hold_up_the_next_one(
    autojump_clock: MockClock,
) -> None:
    async with (
        open_checked_llm(**restarting(max_num_seqs=1)) as llm,
        llm.generate("busy with this", SamplingParams(max_tokens=2000, ignore_eos=True)) as busy,
    ):
        await anext(busy)
        with trio.CancelScope(deadline=trio.current_time() + 5) as scope:
            async with llm.generate("first", SamplingParams(max_tokens=3)):
                scope.deadline = math.inf  # which the engine hears of when it is read again
                async with llm.generate("second", SamplingParams(max_tokens=3)):
                    for _ in range(2):
                        await lose_engine(llm)
                        await anext(busy)
                    _, first, second = (request.state for request in llm._registry.in_flight.values())
                    resumption = llm._registry.engines[0]._resumption
                    assert resumption.on_trial is first

                    await trio.sleep(10)

                    assert first.status is RequestStatus.EXPIRED
                    assert resumption.on_trial is second


async def test_an_engine_may_take_long_to_be_brought_to_where_the_dead_one_was(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_checked_llm(answer="Hi", **restarting(stall_timeout_s=4.0)) as llm:
        await llm.update_weights("/tmp", version="2")
        remember = llm._remember

        def take_long_to_read_weights(message: ToEngine) -> None:
            remember(message)
            if isinstance(message, UtilityCall) and message.method == "update_weights":
                llm.stall()

        monkeypatch.setattr(llm, "_remember", take_long_to_read_weights)
        llm.kill()
        await wait_for(llm, "recovering")
        await wait_for(llm, "ready")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.complete, "Hello")
            await trio.sleep(100)
            llm.resume()

        assert llm.statistics().num_restarts == 1
        assert llm.status.state == "ready"

        llm.stall()  # and now it hangs
        await wait_for(llm, "recovering")
