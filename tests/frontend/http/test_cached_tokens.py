"""usage.prompt_tokens_details.cached_tokens and the field cache_salt, over HTTP and the real scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.fake_client import FakeClient
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import Reply, Server, open_server
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "long " * 20
# <|user|>, 100 characters and <|assistant|>; and the characters alone. Blocks have 32 tokens.
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    COMPLETIONS: {"prompt": LONG},
}
NUM_PROMPT_TOKENS = {CHAT: 102, COMPLETIONS: 100}
NUM_WHOLE_BLOCKS = 96
"""Tokens."""


@asynccontextmanager
async def open_fake_server() -> AsyncIterator[Server]:
    async with open_fake_llm() as fake, open_server(fake.llm) as server:
        yield server


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def ask_long(server: Server, path: str, **fields: Any) -> Reply:
    """The long prompt, unless there is another one among the fields."""
    reply = await server.ask(path, **{**PROMPTS[path], "max_tokens": 3, **fields})
    assert reply.status == 200, reply.body
    return reply


async def usage(server: Server, path: str, *, stream: bool, **fields: Any) -> tuple[int, int]:
    if not stream:
        return counts((await ask_long(server, path, **fields)).json["usage"])
    reply = await ask_long(server, path, stream=True, stream_options={"include_usage": True}, **fields)
    return counts(reply.chunks[-1]["usage"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [{}, {"n": 3, "seed": 1}, {"n": 3, "temperature": 0}], ids=str)
async def test_usage_tells_what_of_the_prompt_was_cached_once_however_many_choices_there_are(
    path: str, stream: bool, choices: dict[str, Any]
) -> None:
    async with open_fake_server() as server:
        first = await usage(server, path, stream=stream, **choices)
        second = await usage(server, path, stream=stream, **choices)

    assert first == (NUM_PROMPT_TOKENS[path], 0)
    assert second == (NUM_PROMPT_TOKENS[path], NUM_WHOLE_BLOCKS)


async def test_continuous_usage_tells_it_from_the_first_chunk_with_text_on() -> None:
    async with open_fake_server() as server:
        await ask_long(server, CHAT)
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = await ask_long(server, CHAT, stream=True, stream_options=options, n=2, seed=1)

    assert {counts(chunk["usage"]) for chunk in reply.chunks} == {(NUM_PROMPT_TOKENS[CHAT], NUM_WHOLE_BLOCKS)}


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_adds_up_what_was_cached_of_several_prompts(stream: bool) -> None:
    async with open_fake_server() as server:
        await ask_long(server, COMPLETIONS)
        prompts = [LONG, "other " * 20, LONG + "!"]
        found = await usage(server, COMPLETIONS, stream=stream, prompt=prompts, n=2, seed=1)

    assert found == (100 + 120 + 101, 2 * NUM_WHOLE_BLOCKS)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_requests_share_a_prompt_only_with_the_same_cache_salt(path: str, stream: bool) -> None:
    async with open_fake_server() as server:
        salts = (None, "alice", "bob", "alice", None)
        cached = [(await usage(server, path, stream=stream, cache_salt=salt))[1] for salt in salts]

    assert cached == [0, 0, 0, NUM_WHOLE_BLOCKS, NUM_WHOLE_BLOCKS]


async def test_a_cache_salt_is_that_of_each_prompt_and_may_have_256_characters() -> None:
    client, salt = FakeClient(), "x" * MAX_CACHE_SALT_CHARS
    async with open_server(client) as server:
        await ask_long(server, COMPLETIONS, prompt=["a", "b"], cache_salt=salt)

    assert [asked.cache_salt for asked in client.asked] == [salt, salt]
