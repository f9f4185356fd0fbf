"""complete, chat, stream_chat, map and statistics: what a program calls most."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_client import End, FakeClient
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.library.library import LibraryCalls
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing import FakeLLM, open_fake_llm

USER = {"role": "user", "content": "Hello"}
ANSWERS = {"Hello": "Hi there", "Bye": "See you"}


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


# ------------------------------------------------------------------------------------ whole answers


async def test_complete_gives_the_whole_answer_at_once() -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        output = await llm.complete("Hello")

        assert (text_of(output), output.finished, output.outputs[0].finish_reason) == ("Hi there", True, "stop")
        await llm.assert_idle()


class RemoteLLM(FakeClient, LibraryCalls):
    """A client that is no AsyncLLM and gets its calls from the base."""


async def test_any_client_has_the_calls_by_their_base() -> None:
    llm = RemoteLLM("Hi", " there", End())

    assert text_of(await llm.complete("Hello")) == "Hi there"
    assert text_of(await llm.chat([USER], max_tokens=9)) == "Hi there"
    async with llm.map(["one", "two"]) as results:
        assert [text_of(output) async for output in results] == ["Hi there", "Hi there"]
    assert await llm.embed([1, 2, 3]) == [3.0, 1.0]


def test_the_interface_itself_has_no_library() -> None:
    own = {name for name in vars(LibraryCalls) if not name.startswith("_")}

    assert {"complete", "chat", "map", "embed", "score"} <= own
    assert not own & set(dir(EngineClient))


async def test_fields_are_set_in_a_copy_of_the_parameters() -> None:
    params = SamplingParams(max_tokens=5, seed=1, output_kind=RequestOutputKind.DELTA)
    async with open_fake_llm() as llm:
        output = await llm.complete("Hello", params, max_tokens=3)

        assert len(output.outputs[0].token_ids) == 3
        (request,) = llm.requests
        assert (request.params.max_tokens, request.params.seed) == (3, 1)
        assert params.max_tokens == 5


@pytest.mark.parametrize(("fields", "error"), [({"nope": 1}, TypeError), ({"temperature": 9}, InvalidRequestError)])
async def test_a_field_that_cannot_be_is_refused_and_nothing_is_sent(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(error):
            await llm.complete("Hello", **fields)
        with pytest.raises(error):
            await llm.chat([USER], **fields)
        with pytest.raises(error):
            llm.map(["Hello"], **fields)

        assert llm.requests == []


async def test_chat_goes_through_the_models_template() -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        output = await llm.chat([{"role": "system", "content": "Be kind."}, USER], max_tokens=20)

        assert text_of(output) == "Hi there"
        assert llm.requests[0].prompt == "<|system|>Be kind.<|user|>Hello<|assistant|>"


async def test_a_chat_in_pieces_is_the_chat_in_one() -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        async with llm.stream_chat([USER], request_id="mine") as stream:
            outputs = [output async for output in stream]

        assert len(outputs) > 1
        assert "".join(map(text_of, outputs)) == "Hi there"
        assert {output.request_id for output in outputs} == {stream.request_id} == {"mine"}
        await llm.assert_idle()


async def test_messages_are_checked_on_entering() -> None:
    async with open_fake_llm() as llm:
        stream = llm.stream_chat([{"role": "user"}])
        with pytest.raises(InvalidRequestError):
            await stream.__aenter__()
        with pytest.raises(RuntimeError, match="outside"):
            await anext(stream)

        await llm.assert_idle()


async def test_a_chat_stream_that_is_used_wrongly_tells_how_it_is_used() -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        stream = llm.stream_chat([USER])
        with pytest.raises(RuntimeError, match="async with"):
            async for _ in stream:
                pass
        async with stream:
            with pytest.raises(RuntimeError, match="once"):
                await stream.__aenter__()


async def test_leaving_a_chat_early_aborts_it() -> None:
    async with open_fake_llm() as llm:
        async with llm.stream_chat([USER]) as stream:
            await anext(stream)

        await llm.assert_idle()
        assert llm.requests[0].was_aborted


async def test_a_loading_engine_refuses_all_of_it() -> None:
    async with open_fake_llm(wait_until_ready=False) as llm:
        with pytest.raises(EngineUnavailableError):
            await llm.complete("Hello")
        with pytest.raises(EngineUnavailableError):
            await llm.chat([USER])
        with pytest.raises(EngineUnavailableError):
            async with llm.map(["Hello"]) as results:
                await anext(results)


# ---------------------------------------------------------------------------------------------- map


async def test_map_keeps_the_order_of_the_prompts(autojump_clock: MockClock) -> None:
    answers = {str(number): "x" * (9 - number) for number in range(9)}
    async with open_fake_llm(answers=answers, step_s=1) as llm:
        async with llm.map(answers, max_in_flight=4) as results:
            texts = [text_of(output) async for output in results]

        assert texts == list(answers.values())
        await llm.assert_idle()


async def test_map_without_order_gives_the_quickest_first(autojump_clock: MockClock) -> None:
    answers = {"slow": "x" * 50, "quick": "y"}
    async with open_fake_llm(answers=answers, step_s=1) as llm:
        async with llm.map(["slow", "quick"], ordered=False) as results:
            texts = [text_of(output) async for output in results]

        assert texts == ["y", "x" * 50]


@pytest.mark.parametrize("ordered", [True, False])
async def test_map_takes_no_more_prompts_than_it_may_have_in_flight(ordered: bool, autojump_clock: MockClock) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "Hello"

    async with open_fake_llm(answers=ANSWERS, step_s=1) as llm:
        async with llm.map(endless(), max_in_flight=3, ordered=ordered) as results:
            await trio.sleep(1000)
            assert (taken, llm.num_running) == (3, 0)

            for number in range(5):
                assert text_of(await anext(results)) == "Hi there"
                await trio.sleep(1000)
                assert taken == 4 + number

        await llm.assert_idle()


async def test_map_reads_prompts_that_come_in_time(autojump_clock: MockClock) -> None:
    async def prompts() -> AsyncIterator[str]:
        for prompt in ("Hello", "Bye"):
            await trio.sleep(60)
            yield prompt

    async with open_fake_llm(answers=ANSWERS) as llm, llm.map(prompts()) as results:
        assert [text_of(output) async for output in results] == ["Hi there", "See you"]


class Prompts:
    """Prompts without end, by an async generator of which is known whether it was closed."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.was_closed = False
        self._fails_at = fails_at

    async def generate(self) -> AsyncIterator[Any]:
        try:
            number = 0
            while True:
                await trio.lowlevel.checkpoint()
                yield "Hello" if number != self._fails_at else []
                number += 1
        finally:
            self.was_closed = True


@pytest.mark.parametrize("ordered", [True, False])
async def test_map_closes_an_async_generator_when_it_is_left_early(ordered: bool) -> None:
    prompts = Prompts()
    generator = prompts.generate()
    async with open_fake_llm(answers=ANSWERS) as llm:
        async with llm.map(generator, max_in_flight=3, ordered=ordered):
            await trio.testing.wait_all_tasks_blocked()
            assert not prompts.was_closed
        assert prompts.was_closed


async def test_a_prompt_that_fails_ends_the_others_once_it_is_known_to_the_reader() -> None:
    prompts = Prompts(fails_at=2)
    async with open_fake_llm() as llm:
        generator = prompts.generate()
        async with llm.map(generator, max_in_flight=9, ordered=False, max_tokens=1000) as results:
            with pytest.raises(InvalidRequestError):
                await anext(results)

            assert [output async for output in results] == []
            with trio.fail_after(5):
                await llm.wait_idle()
            assert [request.was_aborted for request in llm.requests] == [True, True]
        assert prompts.was_closed
        await llm.assert_idle()


async def clumsy(first: Any) -> AsyncIterator[Any]:
    """Prompts whose clean-up fails."""
    yield first
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("clumsy")


async def test_prompts_whose_clean_up_fails_do_not_hide_the_prompt_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(InvalidRequestError):
            async with llm.map(clumsy([])) as results:
                async for _ in results:
                    pass
        await llm.assert_idle()

    assert "clumsy" in caplog.text


async def test_prompts_whose_clean_up_fails_do_not_hide_the_error_of_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        with pytest.raises(ZeroDivisionError):
            async with llm.map(clumsy("Hello")) as results:
                await anext(results)
                await trio.testing.wait_all_tasks_blocked()
                raise ZeroDivisionError
        await llm.assert_idle()

    assert "clumsy" in caplog.text


async def test_one_text_is_no_list_of_prompts() -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(TypeError, match="complete"):
            llm.map("Hello")


async def test_a_conversation_is_refused_for_the_load_before_it_becomes_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fake_llm(max_num_queued_reqs=1) as llm:
        async with llm.generate("Hello", SamplingParams(max_tokens=1000)):
            monkeypatch.setattr(llm.renderer, "render_chat", None)
            with pytest.raises(QueueFullError):
                await llm.chat([USER])
        await llm.assert_idle()


async def test_map_of_nothing_gives_nothing() -> None:
    async with open_fake_llm() as llm, llm.map([]) as results:
        assert [output async for output in results] == []


async def test_leaving_map_early_aborts_all_of_it() -> None:
    async with open_fake_llm() as llm:
        async with llm.map(["Hello"] * 20, max_in_flight=5, max_tokens=1000):
            while llm.num_running < 5:
                await trio.lowlevel.checkpoint()

        await llm.assert_idle()
        assert [request.was_aborted for request in llm.requests] == [True] * 5


async def test_an_error_in_the_block_of_map_comes_out_as_itself() -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(ZeroDivisionError):
            async with llm.map(["Hello"] * 20, max_tokens=1000):
                await trio.lowlevel.checkpoint()
                raise ZeroDivisionError

        await llm.assert_idle()


async def test_a_prompt_that_fails_ends_the_iteration_after_the_answers_before_it() -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:
        texts: list[str] = []
        with pytest.raises(InvalidRequestError):
            async with llm.map(["Hello", "Bye", [], "Hello"]) as results:
                async for output in results:
                    texts.append(text_of(output))

        assert texts == ["Hi there", "See you"]
        await llm.assert_idle()


async def test_an_iteration_that_failed_is_over_and_begins_no_prompt() -> None:
    prompts: Iterator[str | list[int]] = iter([[], *["Hello"] * 1000])
    async with open_fake_llm(answers=ANSWERS) as llm, llm.map(prompts, max_in_flight=2) as results:
        with pytest.raises(InvalidRequestError):
            await anext(results)

        assert [output async for output in results] == []
        assert len(list(prompts)) > 990


async def test_the_engines_death_comes_out_of_map_as_itself_although_all_prompts_fail() -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(EngineDeadError, match="pulled the plug"):
            async with llm.map(["Hello"] * 20, max_tokens=1000) as results:
                while llm.num_running < 20:
                    await trio.lowlevel.checkpoint()
                llm.kill("pulled the plug")
                async for _ in results:
                    pass


async def test_an_error_of_the_prompts_comes_after_their_answers() -> None:
    def prompts() -> Iterator[str]:
        yield "Hello"
        raise KeyError("no more")

    async with open_fake_llm(answers=ANSWERS) as llm:
        with pytest.raises(KeyError):
            async with llm.map(prompts()) as results:
                assert text_of(await anext(results)) == "Hi there"
                await anext(results)


async def test_map_cannot_have_nothing_in_flight() -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(ValueError, match="max_in_flight"):
            llm.map(["Hello"], max_in_flight=0)


async def test_results_cannot_be_read_when_the_block_is_left() -> None:
    async with open_fake_llm() as llm:
        async with llm.map(["Hello"]) as results:
            pass

        with pytest.raises(trio.ClosedResourceError):
            await anext(results)


# ------------------------------------------------------------------------------------- cancellation


async def complete(llm: FakeLLM) -> None:
    await llm.complete("Hello")


async def chat(llm: FakeLLM) -> None:
    await llm.chat([USER])


async def stream_a_chat(llm: FakeLLM) -> None:
    async with llm.stream_chat([USER]) as stream:
        async for _ in stream:
            pass


async def map_all(llm: FakeLLM) -> None:
    async with llm.map(["Hello", "Bye"] * 3, max_in_flight=2) as results:
        assert len([output async for output in results]) == 6


async def map_some(llm: FakeLLM) -> None:
    async with llm.map(["Hello", "Bye"] * 3, max_in_flight=4, ordered=False) as results:
        await anext(results)


async def fail(llm: FakeLLM) -> None:
    llm._executor.faults.clear()
    llm.fail_next_row("on purpose")
    with pytest.raises(EngineGenerateError, match="on purpose"):
        await llm.complete("Hello")


@pytest.mark.parametrize(
    ("work", "least"),
    [(complete, 3), (chat, 4), (stream_a_chat, 5), (map_all, 7), (map_some, 2), (fail, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_cancelling_at_every_checkpoint_leaves_nothing_behind(
    work: Callable[[FakeLLM], Awaitable[None]], least: int
) -> None:
    async with open_fake_llm(answers=ANSWERS) as llm:

        async def check() -> None:
            await llm.assert_idle()
            llm._executor.faults.clear()
            assert text_of(await llm.complete("Bye")) == "See you"

        num_checkpoints = await cancel_at_every_checkpoint(lambda: work(llm), check)

        assert num_checkpoints >= least, "so few checkpoints that the work was hardly interrupted anywhere"


# --------------------------------------------------------------------------------------- statistics


async def test_statistics_tell_what_runs_and_what_was_done(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=1, max_num_seqs=1, num_gpu_blocks_override=8) as llm:
        before = llm.statistics()
        assert (before.state, before.num_free_kv_blocks, before.num_kv_blocks) == ("ready", 8, 8)

        async with llm.generate("Hello") as first, llm.generate("Hello"):
            await anext(first)
            await anext(first)
            during = llm.statistics()
        await llm.assert_idle()
        await llm.complete("Hi", max_tokens=3)
        after = llm.statistics()

        assert (during.num_running, during.num_waiting, during.num_free_kv_blocks) == (1, 1, 7)
        assert (after.num_running, after.num_waiting, after.num_free_kv_blocks) == (0, 0, 8)
        assert (after.num_prompt_tokens, after.num_generation_tokens) == (7, 5)
        assert after.num_finished == {"stop": 0, "length": 1, "abort": 2, "error": 0}
        assert during.num_finished["abort"] == 0, "a snapshot does not change"


async def test_statistics_of_an_engine_that_loads_or_is_dead_can_be_read() -> None:
    async with open_fake_llm(wait_until_ready=False) as llm:
        loading = llm.statistics()
        await llm.wait_until_ready()
        llm.kill()
        await llm.wait_dead()
        dead = llm.statistics()

    assert (loading.state, loading.num_kv_blocks) == ("loading", 0)
    assert (dead.state, dead.num_running) == ("dead", 0)


@pytest.mark.parametrize("messages", [["hi"], "hi", [5], 5])
async def test_what_is_no_list_of_messages_is_refused_as_bad_input(messages: Any) -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(InvalidRequestError):
            await llm.chat(messages)
        await llm.assert_idle()


async def test_prompts_that_cannot_be_iterated_come_as_the_error_of_the_iteration() -> None:
    async with open_fake_llm() as llm, llm.map(5) as results:  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await anext(results)


async def test_a_field_of_sampling_params_as_a_keyword_of_a_block_is_an_error_that_shows_the_way() -> None:
    async with open_fake_llm() as llm:
        untyped: Any = llm
        with pytest.raises(TypeError, match=re.escape("generate(prompt, SamplingParams(max_tokens=3))")):
            untyped.generate("Hello", max_tokens=3)
        with pytest.raises(TypeError, match=re.escape("stream_chat(messages, SamplingParams(stop='.'))")):
            untyped.stream_chat([USER], stop=".")
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_new_tokens'$"):
            untyped.generate("Hello", max_new_tokens=3)
