"""JSON bodies: what is refused before it can hold up the process, and that nothing else is."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_client import FakeClient
from tests.support.http_server import CHAT, COMPLETION, open_server
from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.frontend.http import json_body, request_reader
from trio_llm.frontend.http.json_body import (
    BIG_BODY_BYTES,
    MAX_CONTAINERS,
    MAX_DIGITS,
    MAX_ITEMS,
    MAX_STRINGS,
    parse_json_object,
)
from trio_llm.frontend.http.openai.prompts import parse_prompts

MIB = 1024 * 1024
INPUT = {"input": "Once"}


def listing(item: bytes, count: int) -> bytes:
    return b'{"a":[' + b",".join([item] * count) + b"]}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (listing(b"1", MAX_ITEMS + 2), f"more than {MAX_ITEMS} values"),
        (listing(b"[]", 5 * MIB), f"more than {MAX_ITEMS} values"),
        (listing(b"[]", MAX_CONTAINERS), f"more than {MAX_CONTAINERS} lists and objects"),
        (b"[" * (MAX_CONTAINERS + 1), f"more than {MAX_CONTAINERS} lists and objects"),
        (listing(b'""', MAX_STRINGS), f"more than {MAX_STRINGS} strings"),
        (b'"' * 16 * MIB, f"more than {MAX_STRINGS} strings"),
        (listing(b"9" * (MAX_DIGITS + 1), 1000), f"a number of more than {MAX_DIGITS} digits"),
    ],
    ids=["ids", "empty lists", "lists", "open lists", "strings", "quotation marks", "digits"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_read(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parse_json_object(body, None)


@pytest.mark.parametrize(
    "value",
    [
        [12345] * (MAX_ITEMS - 1),
        [[1]] * (MAX_CONTAINERS - 2),
        ["a"] * (MAX_STRINGS - 1),
        int("9" * MAX_DIGITS),
        ("1" * 199 + " ") * 20_000,
        "9" * 4 * MIB,
        '[{",' * MIB,
        "\\" * MIB,
        '\\"' * MIB,
        '"' * MIB,
        "\n中" * MIB,
    ],
    ids=["ids", "lists", "strings", "number", "runs", "digits", "marks", "backslashes", "escapes", "quotes", "chinese"],
)
def test_a_big_body_within_the_limits_is_read(value: Any) -> None:
    body = json.dumps({"a": value}).encode().ljust(BIG_BODY_BYTES + 1)

    assert parse_json_object(body, None) == {"a": value}


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_a_body_that_is_not_there_is_called_empty(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="the body is empty"):
        parse_json_object(body, "application/json")


def test_who_sends_a_form_is_told_the_header() -> None:
    with pytest.raises(InvalidRequestError, match=r"not 'application/x-www-form-urlencoded'.*-H 'content-type"):
        parse_json_object(b"{}", "application/x-www-form-urlencoded")


VALUES = st.recursive(
    st.integers(-99, 99) | st.none() | st.text('"\\,[{:}]0x\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,[{', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def count(value: Any) -> tuple[int, int, int]:
    """Strings, commas and containers."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    members = [*value, *value.values()] if isinstance(value, dict) else value
    totals = [sum(column) for column in zip((0, 0, 0), *map(count, members), strict=True)]
    return totals[0], totals[1] + max(0, len(value) - 1), totals[2] + 1


@given(fields=st.dictionaries(st.text('"\\,[{', max_size=3), VALUES, max_size=3), ensure_ascii=st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_is_counted_is_what_is_there(fields: dict[str, Any], ensure_ascii: bool) -> None:
    body = json.dumps(fields, ensure_ascii=ensure_ascii).encode()
    names = ("MAX_STRINGS", "MAX_ITEMS", "MAX_CONTAINERS")
    exact = dict(zip(names, count(fields), strict=True))

    for lowered in (None, *names):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_body, "BIG_BODY_BYTES", 0)
            for name in names:
                patch.setattr(json_body, name, exact[name] - (name == lowered))
            if lowered is None:
                assert parse_json_object(body, None) == fields
            elif exact[lowered]:
                with pytest.raises(InvalidRequestError, match="more than"):
                    parse_json_object(body, None)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e400", "1" * 400 + ".0"])
def test_a_number_that_is_not_finite_is_refused_with_its_place(number: str) -> None:
    body = '{"a": [1, {"b": ' + number + "}]}"

    with pytest.raises(InvalidRequestError, match=r"a\.1\.b: NaN and infinite numbers") as caught:
        parse_json_object(body.encode(), None)

    assert caught.value.param == "a.1.b"
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json_object(body.encode().ljust(BIG_BODY_BYTES + 1), None)


@pytest.mark.parametrize("body", [b"[" * 900 + b"NaN" + b"]" * 900, b'{"a":' * 900 + b"NaN" + b"}" * 900])
def test_deep_nesting_around_a_bad_number_is_an_error_of_the_request(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json_object(body, None)


# -------------------------------------------------------------------------------------- in the routes


async def test_big_bodies_are_read_in_a_worker_thread_and_small_ones_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes, content_type: str | None) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return parse_json_object(body, content_type)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(request_reader, "parse_json_object", parse)
    paths = (
        (CHAT, "/v1/chat/completions", 200),
        (COMPLETION, "/v1/completions", 200),
        (INPUT, "/v1/embeddings", 200),
        ({"method": "ping"}, "/collective_rpc", 501),
    )
    async with open_server(FakeClient(), dev_mode=True) as server:
        for base, path, status in paths:
            for size in (BIG_BODY_BYTES, BIG_BODY_BYTES + 1):
                body = json.dumps(base).encode().ljust(size)
                reply = await server.call("POST", path, body, {"content-type": "application/json"})
                assert reply.status == status

    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False] * 4


async def test_a_big_body_that_is_refused_is_a_400() -> None:
    async with open_server(FakeClient()) as server:
        body = listing(b"[]", 5 * MIB)
        reply = await server.call("POST", "/v1/completions", body, {"content-type": "application/json"})

        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert (await server.complete()).status == 200


@pytest.mark.parametrize("prompt", [[None] * 100, [[1], [None] * 100]])
def test_a_prompt_longer_than_the_context_is_refused_by_its_length_alone(prompt: list[Any]) -> None:
    # None is no id: code that looks at the ids would complain of that.
    with pytest.raises(PromptTooLongError, match="maximum context length is 100 tokens, but the prompt has 100"):
        parse_prompts(prompt, name="prompt", most=1024, max_model_len=100)


@pytest.mark.parametrize("wrong", [True, 1.5, "1", None, -1, 2**31, 2**70, 2.0**31, -1.0, 1e300])
def test_the_id_at_fault_is_named_wherever_it_stands(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt: .* is not a token id") as caught:
        parse_prompts([1, 2, wrong, 3], name="prompt", most=1024, max_model_len=100)

    assert caught.value.param == "prompt"
    floats = parse_prompts([0.0, 1, 2.0**31 - 1], name="prompt", most=1024, max_model_len=100)
    assert floats == [[0, 1, 2**31 - 1]]
    assert {type(one) for one in floats[0]} == {int}
    assert parse_prompts([0, 2**31 - 1], name="prompt", most=1024, max_model_len=100) == [[0, 2**31 - 1]]


async def test_the_models_length_is_the_limit_of_a_prompt() -> None:
    client = FakeClient()
    async with open_server(client) as server:
        most = client.model_config.max_model_len
        too_long = await server.complete(prompt=[1] * most)
        longest = await server.complete(prompt=[1] * (most - 1), max_tokens=1)

    assert (too_long.status, too_long.error["type"]) == (400, "invalid_request_error")
    assert f"the prompt has {most}" in too_long.error["message"]
    assert longest.status == 200
