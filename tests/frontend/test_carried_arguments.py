"""What requests of a program carry besides prompt and parameters, and what comes back: priority, tokenization, the
prompt's text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.support.asking import ask
from trio_llm.config import EngineConfig
from trio_llm.errors import ConfigError, InvalidRequestError, PromptTooLongError
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing import FakeLLM, open_fake_llm
from trio_llm.tokenization import TokenizationParams

USER = {"role": "user", "content": "Hi"}
SHORT = SamplingParams(max_tokens=3)


def cut(limit: int, side: Any = "left") -> TokenizationParams:
    return TokenizationParams(truncate_prompt_tokens=limit, truncation_side=side)


# ----------------------------------------------------------------------------------------- priority


async def test_a_lower_priority_is_served_first() -> None:
    order: list[int] = []

    async def run(llm: FakeLLM, priority: int) -> None:
        await ask(llm, f"prompt {priority}", SHORT, priority=priority)
        order.append(priority)

    async with open_fake_llm(scheduling_policy="priority", max_num_seqs=1) as llm:
        await llm.pause_generation(mode="keep")
        async with trio.open_nursery() as nursery:
            for number, priority in enumerate((5, 0, -7, 2)):
                nursery.start_soon(run, llm, priority)
                while llm.num_waiting <= number:
                    await trio.lowlevel.checkpoint()
            await llm.resume_generation()

    assert order == [-7, 0, 2, 5]


@pytest.mark.parametrize("priority", [1, -1, 2**62])
async def test_a_priority_is_refused_where_requests_are_served_in_their_order(priority: int) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("Hi")

    async with open_fake_llm() as llm:
        for prompt in ("Hi", [1, 2], inputs()):
            with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as caught:
                async with llm.generate(prompt, SHORT, priority=priority):
                    pass
            assert caught.value.param == "priority"
        with pytest.raises(InvalidRequestError, match="--scheduling-policy priority"):
            await llm.encode("Hi", priority=priority)
        assert not llm.requests
        await llm.assert_idle()


def test_there_is_no_third_policy() -> None:
    with pytest.raises(ConfigError, match="--scheduling-policy must be fcfs or priority"):
        EngineConfig(scheduling_policy="lottery")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- tokenization


@pytest.mark.parametrize("prompt", ["0123456789", list(b"0123456789")])
@pytest.mark.parametrize(
    ("tokenization", "kept"),
    [
        (None, "0123456789"),
        (cut(4), "6789"),
        (cut(4, "right"), "0123"),
        (cut(99), "0123456789"),
        (cut(-1), "0123456789"),
    ],
)
async def test_of_a_long_prompt_the_end_or_the_beginning_is_kept(
    prompt: Any, tokenization: TokenizationParams | None, kept: str
) -> None:
    async with open_fake_llm() as llm:
        await ask(llm, prompt, SHORT, tokenization=tokenization)
        await llm.complete(prompt, max_tokens=3, tokenization=tokenization)
        await llm.encode(prompt, tokenization=tokenization)
        await llm.embed(prompt, tokenization=tokenization)
        await llm.score(prompt, prompt, tokenization=tokenization)
        async with llm.map([prompt], max_tokens=3, tokenization=tokenization) as results:
            assert len([output async for output in results]) == 1

        assert [request.prompt for request in llm.requests] == [kept] * 7


async def test_minus_one_leaves_room_for_the_answer_in_a_full_context() -> None:
    async with open_fake_llm(max_model_len=32) as llm:
        output = await llm.complete("x" * 100, max_tokens=5, tokenization=cut(-1))
        await llm.encode("x" * 100, tokenization=cut(-1))
        open_ended = await llm.complete("x" * 100, tokenization=cut(-1))

        assert [len(request.token_ids) for request in llm.requests] == [27, 32, 31]
        assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 5)
        assert len(open_ended.outputs[0].token_ids) == 1
        with pytest.raises(PromptTooLongError):
            await llm.complete("x" * 100, max_tokens=5)
        with pytest.raises(InvalidRequestError, match="maximum context length is 32") as caught:
            await llm.complete("x", max_tokens=5, tokenization=cut(33))
        assert caught.value.param == "truncate_prompt_tokens"


async def test_text_beyond_all_that_fits_may_be_cut_too() -> None:
    async with open_fake_llm(max_model_len=64) as llm:
        await llm.complete("x" * 100_000 + "end", max_tokens=1, tokenization=cut(5))

        assert llm.requests[0].prompt == "xxend"


async def test_a_session_takes_no_tokenization_and_the_error_names_it() -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("Hi")

    async with open_fake_llm() as llm:
        for tokenization in (cut(5), {"truncate_prompt_tokens": 5}):
            with pytest.raises(InvalidRequestError) as caught:
                async with llm.generate(inputs(), SHORT, tokenization=tokenization):  # type: ignore[arg-type]
                    pass
            assert caught.value.param == "tokenization"
        with pytest.raises(InvalidRequestError, match="must be TokenizationParams, not dict"):
            await llm.complete("Hi", tokenization={"truncate_prompt_tokens": 5})  # type: ignore[arg-type]
        await llm.assert_idle()


async def test_a_conversation_is_cut_and_continued_as_a_server_would() -> None:
    assistant = {"role": "assistant", "content": "Once upon"}
    async with open_fake_llm() as llm:
        await llm.chat([USER], max_tokens=3)
        await llm.chat([USER], max_tokens=3, add_generation_prompt=False)
        await llm.chat([USER, assistant], max_tokens=3, continue_final_message=True)
        await llm.chat([USER], max_tokens=3, tokenization=cut(2))
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            await llm.chat([USER], add_generation_prompt=True, continue_final_message=True)

        assert [request.prompt for request in llm.requests] == [
            "<|user|>Hi<|assistant|>",
            "<|user|>Hi",
            "<|user|>Hi<|assistant|>Once upon",
            "i<|assistant|>",
        ]


# ---------------------------------------------------------------------------------- the prompt's text


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 2, "temperature": 0}])
async def test_every_output_has_the_text_of_its_prompt(kind: RequestOutputKind, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=3, output_kind=kind, **fields)
    async with open_fake_llm() as llm:
        assert {output.prompt for output in await ask(llm, "Hello", params)} == {"Hello"}
        assert {output.prompt for output in await ask(llm, [72, 105], params)} == {None}


async def test_a_slow_reader_gets_the_text_of_its_prompt_with_merged_outputs() -> None:
    async with open_fake_llm() as llm, llm.generate("Hello", SamplingParams(max_tokens=20)) as stream:
        await anext(stream)
        while llm.num_running:
            await trio.lowlevel.checkpoint()
        merged = await anext(stream)

        assert len(merged.outputs[0].token_ids) > 1
        assert merged.prompt == "Hello"


async def test_the_text_of_a_conversation_is_what_its_template_made_and_cuts_do_not_show() -> None:
    async with open_fake_llm() as llm:
        assert (await llm.chat([USER], max_tokens=3)).prompt == "<|user|>Hi<|assistant|>"
        assert (await llm.complete("Hello", max_tokens=3, tokenization=cut(2))).prompt == "Hello"


async def test_the_outputs_of_a_session_have_no_text_of_a_prompt() -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("Hi")

    async with open_fake_llm() as llm:
        assert {output.prompt for output in await ask(llm, inputs(), SHORT)} == {None}


# ------------------------------------------------------------------------------------ turns of others


@pytest.mark.parametrize(("chunk_size", "has_turns"), [(1, True), (1000, False)])
async def test_other_tasks_get_a_turn_within_a_message_if_chunks_are_small(chunk_size: int, has_turns: bool) -> None:
    """Rows of one message are handled in chunks: a task that runs between two of them sees some requests ahead."""
    params = SamplingParams(max_tokens=30)
    async with open_fake_llm(output_proc_chunk_size=chunk_size) as llm, trio.open_nursery() as nursery:
        counts: list[set[int]] = []

        async def watch() -> None:
            while True:
                counts.append({request.state.num_tokens for request in llm._registry.in_flight.values()})
                await trio.lowlevel.checkpoint()

        nursery.start_soon(watch)
        async with trio.open_nursery() as readers:
            for number in range(6):
                readers.start_soon(ask, llm, f"prompt {number}", params)
        nursery.cancel_scope.cancel()

    # All requests run in the same steps once the last one has begun.
    steady = [seen for seen in counts if len(seen) and min(seen) > 5 and max(seen) < 25]
    assert steady
    assert any(len(seen) > 1 for seen in steady) == has_turns


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_has_at_least_one_row(size: int) -> None:
    with pytest.raises(ConfigError, match="--output-proc-chunk-size"):
        EngineConfig(output_proc_chunk_size=size)
