"""cache_salt: what is computed of prompts is shared only among requests with the same one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.asking import ask
from tests.support.fake_llm import open_fake_llm
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.requests.stream import RequestStream
from trio_llm.sampling import RequestOutputKind, SamplingParams

PROMPT = list(range(70))
NUM_WHOLE_BLOCKS = 64
"""Tokens of the prompt that fill blocks of 32."""
PARAMS = SamplingParams(max_tokens=3, temperature=0)


async def cached_tokens(stream: RequestStream) -> int:
    async with stream as outputs:
        return [output async for output in outputs][-1].num_cached_tokens


async def ask_salted(llm: AsyncLLM, cache_salt: str | None, **fields: Any) -> int:
    outputs = await ask(llm, PROMPT, PARAMS, cache_salt=cache_salt, **fields)
    return outputs[-1].num_cached_tokens


async def test_two_clients_with_different_salts_share_nothing() -> None:
    async with open_fake_llm() as fake:
        assert [await ask_salted(fake.llm, salt) for salt in ("alice", "bob", None)] == [0, 0, 0]


@pytest.mark.parametrize("salt", [None, "a", "x" * MAX_CACHE_SALT_CHARS, "\N{HOT PEPPER}"])
async def test_two_clients_with_the_same_salt_share_all_whole_blocks(salt: str | None) -> None:
    async with open_fake_llm() as fake:
        assert [await ask_salted(fake.llm, salt) for _ in range(2)] == [0, NUM_WHOLE_BLOCKS]


async def test_the_salt_of_a_session_is_that_of_each_of_its_inputs() -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(PROMPT)
        yield StreamingInput(PROMPT)

    async with open_fake_llm() as fake:
        await ask_salted(fake.llm, "alice")
        cached = [
            await cached_tokens(fake.llm.generate(inputs(), PARAMS, cache_salt=salt)) for salt in ("alice", "bob")
        ]

        # What was computed for a later input is found by those who have its salt, too.
        whole = [*PROMPT, *(await fake.llm.complete(PROMPT, PARAMS)).outputs[0].token_ids, *PROMPT]
        later = [await cached_tokens(fake.llm.generate(whole, PARAMS, cache_salt=salt)) for salt in ("bob", "carol")]

    assert cached == [NUM_WHOLE_BLOCKS, 0]
    assert later == [len(whole) // 32 * 32, 0]


async def test_a_streamed_chat_has_a_salt_as_well() -> None:
    messages = [{"role": "user", "content": "long " * 20}]
    async with open_fake_llm() as fake:
        cached = [
            await cached_tokens(fake.llm.stream_chat(messages, PARAMS, cache_salt=salt)) for salt in ("a", "b", "a")
        ]

    assert cached == [0, 0, 96]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("temperature", [0, 1])
async def test_choices_of_one_prompt_tell_what_was_cached_before_any_of_them_and_share_its_salt(
    kind: RequestOutputKind, temperature: float
) -> None:
    params = SamplingParams(max_tokens=3, n=3, temperature=temperature, output_kind=kind)
    async with open_fake_llm() as fake:
        cached = [await cached_tokens(fake.llm.generate(PROMPT, params, cache_salt=salt)) for salt in ("a", "b", "a")]

    assert cached == [0, 0, NUM_WHOLE_BLOCKS]


@pytest.mark.parametrize("salt", ["", "x" * (MAX_CACHE_SALT_CHARS + 1), "\ud800", b"x", 1, True, ["x"]])
@pytest.mark.parametrize("is_session", [False, True])
async def test_a_salt_that_is_no_text_of_1_to_256_characters_is_refused(salt: Any, is_session: bool) -> None:
    async def no_inputs() -> AsyncIterator[StreamingInput]:
        raise AssertionError("asked for, although the session is refused")
        yield

    async with open_fake_llm() as fake:
        prompt: Any = no_inputs() if is_session else PROMPT
        with pytest.raises(InvalidRequestError, match="cache_salt") as refused:
            await cached_tokens(fake.llm.generate(prompt, PARAMS, cache_salt=salt))

        assert refused.value.param == "cache_salt"
        await fake.assert_nothing_is_left()
