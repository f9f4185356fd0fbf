"""Every field with every kind of bad value: a 400 that names the field, and a server that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.support.fake_client import End, FakeClient, Of
from tests.support.http_server import CHAT, COMPLETION, Connection, ask, open_server
from trio_llm.frontend.http.openai.body import parse_body
from trio_llm.frontend.http.openai.chat import ChatRequest
from trio_llm.frontend.http.openai.completions import CompletionRequest
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.frontend.rendering.messages import MAX_MESSAGES, MAX_PARTS
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS
from trio_llm.quoting import quote
from trio_llm.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from trio_llm.testing import open_fake_llm


class Raw(str):
    """JSON text that Python's encoder would not write."""


NON_FINITE = [Raw("NaN"), Raw("-Infinity"), Raw("1e999")]
NOT_NUMBERS: list[Any] = ["", "1", True, [], {}, [1]]
NOT_TEXT: list[Any] = [1, 1.5, True, [], {}]
NOT_BOOLS: list[Any] = ["", "true", 0, 1, 1.5, [], {}]
HUGE = 2**64
MANY_DIGITS = Raw("9" * 4000)
NOT_BIASES: list[Any] = [100.1, -101, HUGE, None, "1", True, [], {}]
NOT_IDS = ["", "-1", "a", "01", " 1", "1.0", "1e1", "\u0661", "9" * 11, str(2**31), "9" * 4000]

SHARED: dict[str, list[Any]] = {
    "model": NOT_TEXT,
    "stream": NOT_BOOLS,
    "stream_options": [1, "", True, [1]],
    "temperature": [-1, 2.1, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "top_p": [-1, 0, 1.1, HUGE, *NOT_NUMBERS],
    "top_k": [-2, 1.5, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "seed": [2**63, -(2**63) - 1, HUGE, MANY_DIGITS, 1.5, *NOT_NUMBERS],
    "max_tokens": [-1, 0, 1.5, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "min_tokens": [-1, 1.5, HUGE, *NOT_NUMBERS],
    "stop": ["", [""], [1], 1, 1.5, True, {}, ["a"] * (MAX_STOP_STRINGS + 1), "x" * 1025],
    "stop_token_ids": [1, "", "1", {}, [-1], ["a"], [1.5], [True], [HUGE], [1] * (MAX_STOP_TOKEN_IDS + 1)],
    "ignore_eos": NOT_BOOLS,
    "include_stop_str_in_output": NOT_BOOLS,
    "skip_special_tokens": NOT_BOOLS,
    "timeout": [-1, 0, 86401, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "request_id": [*NOT_TEXT, "", "a b", "a\n", "a" * 129, "é"],
    "n": [0, -1, MAX_N + 1, 1.5, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "best_of": [2, True],
    "presence_penalty": [-2.1, 2.1, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, -0.1, -HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "logit_bias": [
        [],
        "",
        1,
        True,
        *[{"1": value} for value in NOT_BIASES],
        *[{key: 1} for key in NOT_IDS],
        {str(i): 1 for i in range(MAX_LOGIT_BIAS_TOKENS + 1)},
    ],
    "bad_words": ["a", "", 1, {}, [""], [1], ["a"] * (MAX_BAD_WORDS + 1), ["x" * (MAX_BAD_WORD_CHARS + 1)]],
    "allowed_token_ids": [[], 1, "", {}, [-1], ["a"], [1.5], [True], [HUGE], [1] * (MAX_ALLOWED_TOKEN_IDS + 1)],
    "logprob_token_ids": [[1]],
    "prompt_logprobs": [-1, 21, 1.5, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "spaces_between_special_tokens": NOT_BOOLS,
    "prompt_embeds": ["", "x"],
    "use_beam_search": [True, 0, 1],
    "response_format": [{}, {"type": "json_object"}, {"type": "json_schema"}, "", 1],
    "structured_outputs": [{"json": {}}, [], ""],
    "guided_json": [{}],
    "return_token_ids": NOT_BOOLS,
    "priority": [2**63, -(2**63) - 1, HUGE, MANY_DIGITS, 1.5, *NOT_NUMBERS],
    "add_special_tokens": NOT_BOOLS,
    "truncate_prompt_tokens": [0, -2, 4097, 1.5, HUGE, MANY_DIGITS, *NOT_NUMBERS],
    "truncation_side": ["", "LEFT", "both", *NOT_TEXT],
    "return_prompt_text": NOT_BOOLS,
    "return_weight_versions": NOT_BOOLS,
    "cache_salt": ["", "x" * (MAX_CACHE_SALT_CHARS + 1), *NOT_TEXT],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "messages": [None, [], "", 1, {}, True, [CHAT["messages"][0]] * (MAX_MESSAGES + 1)],
    "max_completion_tokens": [-1, 0, 1.5, HUGE, *NOT_NUMBERS],
    "logprobs": NOT_BOOLS,
    "top_logprobs": [-1, 1, 21, 1.5, HUGE, "", "1", True],
    "tools": [[{"type": "function"}], {}, "", 1],
    "functions": [[{"name": "f"}], {}, "", 1],
    "tool_choice": ["required", {"type": "function"}, "", 1],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [[], "", 1, {str(index): 1 for index in range(65)}],
    "add_generation_prompt": NOT_BOOLS,
    "continue_final_message": NOT_BOOLS,
    "echo": [True, 0],
}
COMPLETION_ONLY: dict[str, list[Any]] = {
    "logprobs": [-1, 21, 1.5, HUGE, *NOT_NUMBERS],
    "suffix": ["x", 1],
    "echo": NOT_BOOLS,
}


def cases(table: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    for name, values in table.items():
        yield from ((name, value) for value in values)
        yield from ((name, value) for value in NON_FINITE)


def encode(base: dict[str, Any], name: str, value: Any) -> bytes:
    """The base request with one field set. Raw values go in as they are."""
    text = json.dumps({**base, name: None} | ({} if isinstance(value, Raw) else {name: value}))
    if isinstance(value, Raw):
        text = text.replace(f'"{name}": null', f'"{name}": {value}')
    return text.encode()


async def post(connection: Connection, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    await connection.request("POST", path, body, {"content-type": "application/json"})
    reply = await connection.reply()
    return reply.status, reply.json.get("error", {})


@pytest.mark.parametrize(
    ("path", "base", "table"),
    [
        ("/v1/chat/completions", CHAT, SHARED | CHAT_ONLY),
        ("/v1/completions", COMPLETION, SHARED | COMPLETION_ONLY),
    ],
)
async def test_a_bad_value_is_a_400_that_names_its_field(
    path: str, base: dict[str, Any], table: dict[str, list[Any]]
) -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        for name, value in cases(table):
            status, error = await post(connection, path, encode(base, name, value))

            shown = f"{name}={str(value)[:50]}"
            assert status == 400, shown
            assert error["type"] == "invalid_request_error", shown
            assert error["param"] is not None, shown
            assert error["param"].split(".")[0] == name, shown
            assert len(error["message"]) < 500, shown
            assert client.asked == [], shown
        assert (await post(connection, path, json.dumps(base).encode()))[0] == 200


MESSAGES: list[tuple[Any, str]] = [
    (None, "messages.0"),
    ("hi", "messages.0"),
    ({}, "messages.0.role"),
    ({"role": "user"}, "messages.0.content"),
    ({"role": "user", "content": None}, "messages.0.content"),
    ({"role": "user", "content": 1}, "messages.0.content"),
    ({"role": "user", "content": {}}, "messages.0.content"),
    ({"role": "nobody", "content": "x"}, "messages.0.role"),
    ({"role": ["user"], "content": "x"}, "messages.0.role"),
    ({"role": "user", "content": [1]}, "messages.0.content.0"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}, "messages.0.content.1.text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0.type"),
    ({"role": "user", "content": ["a"] * (MAX_PARTS + 1)}, "messages.0.content"),
    ({"role": "user", "content": "x", "name": 1}, "messages.0.name"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls"),
]


async def test_a_bad_message_is_a_400_that_names_its_place() -> None:
    async with open_server(FakeClient()) as server, server.connect() as connection:
        for message, param in MESSAGES:
            body = json.dumps({"messages": [message]}).encode()
            status, error = await post(connection, "/v1/chat/completions", body)

            assert (status, error["param"]) == (400, param), message


PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"stream_options": {}}, "stream_options"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), PAIRS)
async def test_fields_that_do_not_go_together_are_a_400(fields: dict[str, Any], param: str) -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.chat(**fields)

    assert (reply.status, reply.error["param"]) == (400, param)


async def test_at_most_ten_problems_are_listed() -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.chat(stop_token_ids=["a"] * 100)

    assert reply.status == 400
    assert reply.error["message"].count(";") == 10
    assert reply.error["message"].endswith("and 90 more")


async def test_long_input_is_quoted_shortly_and_in_ascii() -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.chat(temperature="é" * 100_000)

    assert reply.status == 400
    assert len(reply.error["message"]) < 300
    assert reply.error["message"].isascii()


async def test_a_huge_list_is_refused_by_its_length() -> None:
    async with open_server(FakeClient()) as server:
        for field in ("stop_token_ids", "stop", "allowed_token_ids", "messages"):
            with trio.fail_after(10):
                reply = await server.chat(**{field: [1] * 200_000})
            assert (reply.status, reply.error["param"]) == (400, field)


# ---------------------------------------------------------------------------------- fields that are refused


async def test_all_fields_that_are_not_supported_are_listed_in_the_order_of_the_table() -> None:
    fields: dict[str, Any] = {"tools": [{}], "suffix": "x", "best_of": 2, "use_beam_search": True, "stop": 5}
    async with open_server(FakeClient()) as server:
        chat = await server.chat(**fields)
        completion = await server.complete(**fields)

    assert (chat.error["param"], chat.error["message"]) == (
        "best_of",
        "best_of (other than 1), use_beam_search (other than false) and tools are not supported by this server; "
        "leave them out",
    )
    assert completion.error["message"].startswith(
        "best_of (other than 1), use_beam_search (other than false) and suffix"
    )


async def test_one_field_that_is_not_supported_is_named_and_not_its_value() -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.chat(tools=[{"type": "function"}])

    assert reply.error["message"] == "tools is not supported by this server; leave it out"


async def test_of_many_fields_that_are_not_supported_ten_are_listed() -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.chat(**dict.fromkeys(ChatRequest.not_supported, "x"))

    assert reply.error["message"].count(",") == 9
    assert f"and {len(ChatRequest.not_supported) - 10} more fields are not supported" in reply.error["message"]


WHOLE: dict[str, Any] = {
    **dict.fromkeys(("top_k", "seed", "n", "max_tokens", "min_tokens", "prompt_logprobs"), 2.0),
    "truncate_prompt_tokens": -1.0,
    "stop_token_ids": [2.0, 3],
    "allowed_token_ids": [2.0, 3],
    "best_of": 1.0,
    "priority": -0.0,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_whole_number_is_an_integer_however_it_is_written(path: str) -> None:
    own: dict[str, Any] = (
        {**CHAT, "max_completion_tokens": 3.0, "logprobs": True, "top_logprobs": 2.0}
        if path == "/v1/chat/completions"
        else {"prompt": [2.0, 3], "logprobs": 2.0}
    )
    client = FakeClient(*(Of(index, End("a")) for index in range(2)))
    async with open_server(client) as server:
        reply = await server.call("POST", path, {**own, **WHOLE})

    assert reply.status == 200, reply.body
    [asked] = client.asked
    params = asked.params
    numbers = (params.top_k, params.seed, params.n, params.max_tokens, params.min_tokens, params.logprobs)
    limit = 3 if "messages" in own else 2
    assert numbers == (2, 2, 2, limit, 2, 2)
    assert {type(number) for number in (*numbers, *params.stop_token_ids, *(params.allowed_token_ids or ()))} == {int}
    assert all(type(token_id) is int for token_id in asked.prompt)


def test_every_field_of_integers_takes_whole_numbers() -> None:
    for model in (ChatRequest, CompletionRequest):
        for name, schema in openapi_document("1")["components"]["schemas"][model.__name__]["properties"].items():
            if {"type": "integer"} in schema.get("anyOf", ()):
                body: dict[str, Any] = {"messages": [], "prompt": "x", name: 1.0, "logprobs": None}
                assert getattr(parse_body(model, body), name) in (1, None), name


@pytest.mark.parametrize("value", ["6", True, 1.5, []])
@pytest.mark.parametrize(
    ("path", "field", "range_"),
    [
        ("/v1/chat/completions", "max_tokens", "an integer from 1 to 9223372036854775807"),
        ("/v1/chat/completions", "top_logprobs", "an integer from 0 to 20"),
        ("/v1/completions", "n", "an integer from 1 to 128"),
        ("/v1/completions", "seed", "an integer from -9223372036854775808 to 9223372036854775807"),
        ("/v1/completions", "top_p", "a number above 0 and up to 1"),
        ("/v1/completions", "temperature", "a number from 0 to 2"),
        ("/v1/embeddings", "timeout", "a number above 0 and up to 86400"),
    ],
)
async def test_a_value_of_the_wrong_kind_is_refused_with_the_range(
    path: str, field: str, range_: str, value: Any
) -> None:
    if value == 1.5 and "a number" in range_:
        value = {}
    reply = await ask(FakeClient(), path, **{field: value})

    assert (reply.status, reply.error["param"]) == (400, field)
    assert reply.error["message"] == f"{field} must be {range_}, not {quote(value)}"


@pytest.mark.parametrize("min_tokens", [1, 5])
async def test_a_prompt_alone_has_no_tokens_to_be_at_least(min_tokens: int) -> None:
    reply = await ask(FakeClient(), "/v1/completions", echo=True, max_tokens=0, min_tokens=min_tokens)

    assert (reply.status, reply.error["param"]) == (400, "min_tokens")
    assert reply.error["message"] == f"min_tokens ({min_tokens}) must not be above max_tokens (0)"


FIELDS_OF_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/pooling": "input",
    "/score": "text_1",
}


@pytest.mark.parametrize("num_chars", [100, 1_000_000])
@pytest.mark.parametrize(("path", "field"), FIELDS_OF_PROMPTS.items())
async def test_a_prompt_that_is_too_long_is_named_by_its_field(path: str, field: str, num_chars: int) -> None:
    text = "abcd" * (num_chars // 4)
    given: Any = [{"role": "user", "content": text}] if field == "messages" else text
    async with open_fake_llm(max_model_len=32) as llm:
        reply = await ask(llm, path, **{field: given})

    assert (reply.status, reply.error["param"]) == (400, field)
    assert "the prompt has" in reply.error["message"]


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_so_is_a_list_of_too_many_ids(path: str, field: str) -> None:
    reply = await ask(FakeClient(), path, **{field: [1] * 5000})

    assert (reply.status, reply.error["param"]) == (400, field)
