"""Answers that repeat their prompt: echo, prompt_logprobs, return_token_ids; over HTTP, with a fake engine behind.

A token of its tokenizer is a byte.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.http_server import Reply, Server, open_server
from trio_llm.frontend.requests.input_processor import MAX_PROMPT_LOGPROBS
from trio_llm.testing.answers import END, LOGITS_WIDTH
from trio_llm.testing.fake_llm import open_fake_llm

TEXT = "Once é"
IDS = list(TEXT.encode())


@asynccontextmanager
async def open_fake_server(**settings: Any) -> AsyncIterator[Server]:
    async with open_fake_llm(answer="abc", **settings) as llm:
        async with open_server(llm) as server:
            yield server
        await llm.assert_idle()


async def complete(**fields: Any) -> Reply:
    async with open_fake_server() as server:
        return await server.complete(**({"prompt": TEXT} | fields))


async def chat(**fields: Any) -> Reply:
    async with open_fake_server() as server:
        return await server.chat(**fields)


def names(entries: list[dict[str, Any] | None]) -> list[str | None]:
    """The token ids that stand first."""
    return [None if entry is None else next(iter(entry)) for entry in entries]


# ---------------------------------------------------------------------------------------------- echo


@pytest.mark.parametrize("prompt", [TEXT, IDS])
async def test_echo_puts_the_prompt_in_front_of_the_text(prompt: Any) -> None:
    reply = await complete(prompt=prompt, echo=True)

    assert reply.json["choices"][0]["text"] == TEXT + "abc"
    assert reply.json["usage"]["completion_tokens"] == 4  # the end is one


async def test_with_logprobs_the_prompt_s_tokens_come_first_and_the_first_one_has_null() -> None:
    plain = (await complete(prompt="Once", logprobs=2)).json["choices"][0]["logprobs"]
    echoed = (await complete(prompt="Once", logprobs=2, echo=True)).json["choices"][0]["logprobs"]

    num_prompt = 4
    assert echoed["tokens"][:num_prompt] == list("Once")
    assert echoed["token_logprobs"][0] is None
    assert echoed["top_logprobs"][0] is None
    assert all(value < 0 for value in echoed["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in echoed["top_logprobs"][1:num_prompt])
    assert {name: column[num_prompt:] for name, column in echoed.items() if name != "text_offset"} == {
        name: column for name, column in plain.items() if name != "text_offset"
    }
    assert echoed["text_offset"][:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("n", [1, 2])
async def test_streamed_it_is_the_same(logprobs: int | None, n: int) -> None:
    fields: dict[str, Any] = {"prompt": ["Once", "x"], "echo": True, "n": n, "seed": 3} | (
        {} if logprobs is None else {"logprobs": logprobs}
    )
    whole = (await complete(**fields)).json["choices"]
    chunks = (await complete(**fields, stream=True)).chunks

    for choice in whole:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert choice["text"] == ("Once", "x")[choice["index"] // n] + "abc"
        if logprobs is not None:
            for name, column in choice["logprobs"].items():
                assert [entry for one in mine for entry in one["logprobs"][name]] == column


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens_0_gives_the_prompt_alone_with_its_logprobs(stream: bool) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await complete(echo=True, max_tokens=0, logprobs=1, stream=stream, **fields)

    choices = [chunk["choices"][0] for chunk in reply.chunks[:-1]] if stream else reply.json["choices"]
    usage = (reply.chunks[-1] if stream else reply.json)["usage"]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert choices[-1]["finish_reason"] == "length"
    values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert len(values) == len(IDS)
    assert [value is None for value in values] == [True] + [False] * (len(IDS) - 1)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), 0)


async def test_max_tokens_0_without_echo_is_a_400() -> None:
    reply = await complete(max_tokens=0)

    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("prompt", [[1, LOGITS_WIDTH], [2**31 - 1]])
async def test_a_token_id_that_the_model_does_not_have_is_a_400_with_echo_too(prompt: list[int]) -> None:
    reply = await complete(prompt=prompt, echo=True)

    assert (reply.status, reply.error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "prompt", [[65] * (MAX_PROMPT_LOGPROBS // 21 + 1), [[65] * (MAX_PROMPT_LOGPROBS // 84 + 1)] * 4]
)
@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}])
async def test_too_many_log_probabilities_of_prompts_are_a_400(prompt: list[Any], fields: dict[str, Any]) -> None:
    async with open_fake_server(max_model_len=16384) as server:
        reply = await server.complete(prompt=prompt, **fields)

    assert (reply.status, reply.error["param"]) == (400, "logprobs" if "echo" in fields else "prompt_logprobs")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["🎉 hi", list("🎉 hi".encode())])
async def test_offsets_are_positions_in_the_text_where_characters_are_split_over_tokens(
    prompt: Any, stream: bool
) -> None:
    async with open_fake_llm(answer="né🎉!") as llm, open_server(llm) as server:
        reply = await server.complete(prompt=prompt, echo=True, logprobs=0, stream=stream)
        alone = await server.complete(prompt=prompt, logprobs=0, stream=stream)

    def columns(reply: Reply, name: str) -> list[Any]:
        choices = [chunk["choices"][0] for chunk in reply.chunks] if stream else reply.json["choices"]
        return [entry for choice in choices for entry in choice["logprobs"][name]]

    text = "🎉 hiné🎉!"
    offsets = columns(reply, "text_offset")
    answer = [0, 1, 1, 2, 2, 2, 2, 3, 4]  # n, both bytes of é, four of the emoji, ! and the end
    assert offsets == [0, 0, 0, 0, 1, 2, 3, *[4 + offset for offset in answer]]
    assert columns(alone, "text_offset") == answer
    assert offsets[-1] == len(text)
    for offset, token in zip(offsets, columns(reply, "tokens"), strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[offset : offset + len(token)] == token


async def test_offsets_do_not_count_special_tokens_that_the_text_does_not_show() -> None:
    shown = [*b"a", 257, *b"b"]
    with_special = (await complete(prompt=shown, echo=True, logprobs=0, skip_special_tokens=False)).json["choices"][0]
    without = (await complete(prompt=shown, echo=True, logprobs=0)).json["choices"][0]

    assert with_special["text"] == "a<|system|>babc"
    assert with_special["logprobs"]["text_offset"][:4] == [0, 1, 11, 12]
    assert without["text"] == "ababc"
    assert without["logprobs"]["text_offset"][:4] == [0, 1, 1, 2]


# ------------------------------------------------------------------------- return_tokens_as_token_ids


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_named_by_their_ids_are_kept_apart_where_their_texts_are_equal(stream: bool) -> None:
    """Bytes that are no text of their own all show as U+FFFD."""
    async with open_fake_server() as server:
        fields: dict[str, Any] = {"prompt": TEXT, "logprobs": 20, "echo": True, "stream": stream}
        replies = [await server.complete(**fields, return_tokens_as_token_ids=by_id) for by_id in (False, True)]

    def entries(reply: Reply, name: str) -> list[Any]:
        choices = [chunk["choices"][0] for chunk in reply.chunks] if stream else reply.json["choices"]
        return [entry for choice in choices for entry in choice["logprobs"][name]]

    by_text, by_id = ([len(top) for top in entries(reply, "top_logprobs")[1:]] for reply in replies)
    assert set(by_id) <= {20, 21}
    assert min(by_text) < 20
    names = entries(replies[1], "tokens")
    assert names[: len(IDS)] == [f"token_id:{token_id}" for token_id in IDS]
    assert names[len(IDS) :][:3] == [f"token_id:{token_id}" for token_id in b"abc"]
    assert entries(replies[0], "text_offset") == entries(replies[1], "text_offset")


async def test_tokens_of_a_chat_are_named_by_their_ids_too() -> None:
    reply = await chat(logprobs=True, top_logprobs=20, return_tokens_as_token_ids=True)

    content = reply.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:3]] == [f"token_id:{token_id}" for token_id in b"abc"]
    assert content[0]["bytes"] == [ord("a")]
    for entry in content:
        assert len({one["token"] for one in entry["top_logprobs"]}) == 20


# ----------------------------------------------------------------------------------- prompt_logprobs


async def test_prompt_logprobs_stand_in_the_choice_by_token_id() -> None:
    reply = await complete(prompt_logprobs=2)

    entries = reply.json["choices"][0]["prompt_logprobs"]
    assert names(entries) == [None, *map(str, IDS[1:])]
    own = entries[1]["110"]
    assert (own["decoded_token"], own["rank"]) == ("n", 2)
    assert own["logprob"] < 0
    assert 2 <= len(entries[1]) <= 3
    assert reply.json["choices"][0]["logprobs"] is None


async def test_prompt_logprobs_of_a_conversation_stand_beside_its_choices() -> None:
    reply = await chat(prompt_logprobs=0, n=2, return_token_ids=True)

    assert names(reply.json["prompt_logprobs"]) == [None, *map(str, reply.json["prompt_token_ids"][1:])]
    assert [choice["message"]["content"] for choice in reply.json["choices"]] == ["abc", "abc"]


async def test_two_fields_may_ask_for_different_numbers_of_alternatives() -> None:
    choice = (await complete(prompt="Once", echo=True, logprobs=3, prompt_logprobs=1)).json["choices"][0]

    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {1, 2}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:4]} <= {3, 4}


# ---------------------------------------------------------------------------------- return_token_ids


async def test_token_ids_of_prompt_and_answer_stand_in_the_choice() -> None:
    choice = (await complete(return_token_ids=True)).json["choices"][0]

    assert choice["prompt_token_ids"] == IDS
    assert choice["token_ids"][:3] == list(b"abc")
    assert choice["text"] == "abc"


async def test_streamed_completions_have_new_ids_in_each_chunk_and_the_prompt_s_once() -> None:
    reply = await complete(return_token_ids=True, stream=True)

    choices = [chunk["choices"][0] for chunk in reply.chunks]
    whole = (await complete(return_token_ids=True)).json["choices"][0]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [IDS]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]


async def test_streamed_chats_have_new_ids_in_each_chunk_and_the_prompt_s_in_the_first() -> None:
    whole = (await chat(return_token_ids=True)).json
    chunks = (await chat(return_token_ids=True, stream=True)).chunks

    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


async def test_who_does_not_ask_gets_none_of_it() -> None:
    choice = (await complete()).json["choices"][0]
    chunks = (await complete(stream=True)).chunks

    assert (choice["token_ids"], choice["prompt_token_ids"], choice["prompt_logprobs"]) == (None, None, None)
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks)


# -------------------------------------------------------------------------------- allowed, bad words


async def test_only_allowed_tokens_come_and_bad_words_do_not() -> None:
    allowed = await complete(allowed_token_ids=[98], max_tokens=5)
    bad = await complete(bad_words=["b"], max_tokens=3)

    assert allowed.json["choices"][0]["text"] == "bbbbb"
    assert "b" not in bad.json["choices"][0]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [END], "min_tokens": 4},
        {"allowed_token_ids": [98], "min_tokens": 1, "stop_token_ids": [98]},
        {"allowed_token_ids": [98], "bad_words": ["b"]},
        {"allowed_token_ids": [98], "bad_words": ["cb"], "prompt": "abc"},
    ],
    ids=lambda fields: " ".join(list(fields)[1:]),
)
async def test_fields_that_leave_no_token_are_a_400_that_names_them(fields: dict[str, Any]) -> None:
    reply = await complete(**fields)

    assert (reply.status, reply.error["param"]) == (400, "allowed_token_ids")
    assert all(name in reply.error["message"] for name in fields.keys() - {"prompt"})


async def test_ids_that_the_model_does_not_have_are_a_400() -> None:
    reply = await complete(allowed_token_ids=[1, LOGITS_WIDTH])

    assert (reply.status, reply.error["param"]) == (400, "allowed_token_ids")
