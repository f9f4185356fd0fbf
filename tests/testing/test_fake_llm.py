"""FakeLLM: answers, time, faults and what can be seen of it."""

from __future__ import annotations

import time

import pytest
import trio
from trio.testing import MockClock

from trio_llm.errors import ConfigError, EngineDeadError, EngineGenerateError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.outputs import RequestOutput
from trio_llm.testing import FakeLLM, open_fake_llm
from trio_llm.testing.answers import LOGITS_WIDTH, read_text


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("answer", ["Hi there", "", "žluťoučký 🐴", "<|user|>"])
async def test_an_answer_comes_back_as_it_was_given(answer: str) -> None:
    async with open_fake_llm(answers={"Hello": answer}) as llm:
        assert isinstance(llm, AsyncLLM)
        output = await llm.complete("Hello")

        assert (text_of(output), output.outputs[0].finish_reason) == (answer, "stop")


async def test_an_unknown_prompt_gets_the_answer_for_all_others() -> None:
    async with open_fake_llm(answers={"Hello": "Hi"}, answer="What?") as llm:
        assert text_of(await llm.complete("Hello")) == "Hi"
        assert text_of(await llm.complete("Hello!")) == "What?"
        assert text_of(await llm.chat([{"role": "user", "content": "Hello\n"}])) == "What?"
        assert text_of(await llm.chat([{"role": "tool", "content": "Hello"}])) == "Hi"
        assert text_of(await llm.complete("<|user|>Hello")) == "What?"


async def test_without_answers_the_prompt_and_the_seed_decide() -> None:
    async with open_fake_llm() as llm:
        first = text_of(await llm.complete("Hello", max_tokens=30, seed=1))

        assert len(first) == 30
        assert first.isascii()
        assert text_of(await llm.complete("Hello", max_tokens=30, seed=1)) == first
        assert text_of(await llm.complete("Bye", max_tokens=30, seed=1)) != first


async def test_answers_may_change_and_a_running_request_keeps_its_own(autojump_clock: MockClock) -> None:
    async with open_fake_llm(answers={"Hello": "one"}, step_s=1) as llm:
        async with llm.generate("Hello") as stream:
            text = text_of(await anext(stream))
            llm.answers = {"Hello": "two"}
            llm.answer = "three"
            text += "".join([text_of(output) async for output in stream])

        assert text == "one"
        assert text_of(await llm.complete("Hello")) == "two"
        assert text_of(await llm.complete("Bye")) == "three"
        assert (llm.answers, llm.answer) == ({"Hello": "two"}, "three")


async def test_an_answer_survives_preemption(autojump_clock: MockClock) -> None:
    answers = {name: name * 60 for name in "abcd"}
    async with open_fake_llm(answers=answers, num_gpu_blocks_override=4) as llm:
        async with llm.map(answers) as results:
            texts = [text_of(output) async for output in results]

        assert texts == list(answers.values())
        assert llm.core.core.stats.num_preempted > 0, "the case that this is about"


async def test_the_tokenizers_ids_are_bytes() -> None:
    text = "".join(map(chr, range(0x800))) + "<|user|>"
    async with open_fake_llm(max_model_len=10_000) as llm:
        token_ids = await llm.renderer.render_prompt(text)

    assert token_ids == [*text.removesuffix("<|user|>").encode(), 258]
    assert read_text(token_ids) == text
    assert max(token_ids) < LOGITS_WIDTH


# --------------------------------------------------------------------------------------------- time


async def test_an_hour_of_engine_time_passes_at_once(autojump_clock: MockClock) -> None:
    began_s = time.monotonic()
    async with open_fake_llm(answer="x" * 59, step_s=60) as llm:
        before_s = trio.current_time()
        await llm.complete("Hello")

        assert trio.current_time() - before_s == 3600
    assert time.monotonic() - began_s < 600, "it took the time that it pretends to take"


async def test_opening_takes_no_time_even_with_a_mock_clock(autojump_clock: MockClock) -> None:
    before_s = trio.current_time()
    async with open_fake_llm() as llm:
        await llm.complete("Hello " * 600, max_tokens=1)  # a text that is long enough for a thread elsewhere

        assert trio.current_time() == before_s


async def test_a_slow_engine_is_slow_from_the_next_step_on(autojump_clock: MockClock) -> None:
    async with open_fake_llm(answer="abcdefghij") as llm:
        before_s = trio.current_time()
        async with llm.generate("Hello") as stream:
            await anext(stream)
            assert trio.current_time() == before_s
            llm.slow(10)
            async for _ in stream:
                pass

        assert trio.current_time() - before_s >= 50, "a step or two may have been on their way"


# ------------------------------------------------------------------------------------------- faults


async def test_a_killed_engine_tells_the_reason_after_the_text() -> None:
    async with open_fake_llm() as llm, llm.generate("Hello") as stream:
        await anext(stream)
        llm.kill("the power is off")

        with pytest.raises(EngineDeadError, match="the power is off"):
            async for _ in stream:
                pass
        assert llm.statistics().state == "dead"
        await llm.assert_idle()


async def test_a_stalled_engine_says_nothing_and_then_goes_on(autojump_clock: MockClock) -> None:
    async with open_fake_llm(answer="Hi there", step_s=1) as llm, llm.generate("Hello") as stream:
        text = text_of(await anext(stream))
        llm.stall()
        llm.stall()
        with trio.move_on_after(100) as scope:
            text += text_of(await anext(stream))
        assert scope.cancelled_caught
        assert llm.core.is_paused

        llm.resume()

        assert text + "".join([text_of(output) async for output in stream]) == "Hi there"


@pytest.mark.parametrize(
    ("fault", "message"),
    [(FakeLLM.fail_next_row, "failed by the test"), (FakeLLM.faulty_token, "-1")],
)
async def test_a_fault_of_one_row_fails_one_request_alone(fault: object, message: str) -> None:
    async with open_fake_llm(answer="Hi there") as llm:
        fault(llm)  # type: ignore[operator]
        with pytest.raises(EngineGenerateError, match=message):
            await llm.complete("Hello")

        assert text_of(await llm.complete("Hello")) == "Hi there"
        await llm.assert_idle()


async def test_a_lost_message_ends_the_engine() -> None:
    async with open_fake_llm(answer="Hi there") as llm:
        llm.drop_next_frame()
        with pytest.raises(EngineDeadError, match="lost"):
            await llm.complete("Hello")

        await llm.assert_idle()


# --------------------------------------------------------------------------------------- inspection


async def test_what_was_asked_can_be_seen() -> None:
    async with open_fake_llm(answer="Hi there. You") as llm:
        async with llm.generate("Hello", request_id="mine") as stream:
            await anext(stream)
        await llm.complete([72, 105], max_tokens=3)
        await llm.complete("Hello", stop=(".",))

        assert [(r.prompt, r.was_aborted) for r in llm.requests] == [("Hello", True), ("Hi", False), ("Hello", True)]
        assert llm.requests[0].request_id == "mine"
        assert llm.requests[1].token_ids == [72, 105]
        assert llm.requests[1].params.max_tokens == 3


async def test_the_schedulers_numbers_can_be_seen(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=1, max_num_seqs=2, num_gpu_blocks_override=9) as llm:
        assert (llm.num_running, llm.num_waiting, llm.num_free_blocks) == (0, 0, 9)
        async with llm.generate("a") as first, llm.generate("b"), llm.generate("c"):
            await anext(first)
            assert (llm.num_running, llm.num_waiting, llm.num_free_blocks) == (2, 1, 7)
        await llm.assert_idle()
        assert (llm.num_running, llm.num_waiting, llm.num_free_blocks) == (0, 0, 9)


async def test_an_unfinished_request_is_not_idle() -> None:
    async with open_fake_llm() as llm, llm.generate("Hello", request_id="mine") as stream:
        with pytest.raises(AssertionError, match="mine"):
            await llm.assert_idle()
        await anext(stream)


async def test_a_stalled_engine_cannot_be_asserted_to_be_idle() -> None:
    async with open_fake_llm() as llm:
        llm.stall()
        with pytest.raises(AssertionError, match="stalled"):
            await llm.assert_idle()


async def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(TypeError):
        async with open_fake_llm(no_such_setting=1):
            pass
    with pytest.raises(ConfigError):
        async with open_fake_llm(max_num_seqs=0):
            pass
    async with open_fake_llm(max_model_len=7) as llm:
        assert llm.model_config.max_model_len == 7
