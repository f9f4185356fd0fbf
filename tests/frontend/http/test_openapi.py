"""The OpenAPI document: its schemas judge requests as the server does, and describe what the server answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.fake_client import FakeClient
from tests.support.http_server import Reply, open_server
from tests.support.json_schema import find_problems, is_valid, keywords
from trio_llm.errors import EngineGenerateError, InvalidRequestError
from trio_llm.frontend.control.status import EngineState, EngineStatus
from trio_llm.frontend.http.json_body import parse_json_object
from trio_llm.frontend.http.openai.body import parse_body
from trio_llm.frontend.http.openai.chat import ChatRequest, chat_params
from trio_llm.frontend.http.openai.completions import CompletionRequest, completion_params
from trio_llm.frontend.http.openai.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    embedding_params,
    pair_up,
    pooling_params,
    score_params,
)
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.frontend.http.server.timeouts import timeout_of
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.testing import open_fake_llm

DOCUMENT: Final = openapi_document("1")
SCHEMAS: Final = DOCUMENT["components"]["schemas"]
TEMPLATE: Final = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")


def read_chat(body: Mapping[str, Any]) -> None:
    request = parse_body(ChatRequest, body)
    chat_params(request, {})
    TEMPLATE.render(
        request.messages,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs,
    )


def read_completion(body: Mapping[str, Any]) -> None:
    request = parse_body(CompletionRequest, body)
    completion_params(request, {})
    parse_prompts(request.prompt, name="prompt", most=1024, max_model_len=10_000)


def read_embedding(body: Mapping[str, Any]) -> None:
    request = parse_body(EmbeddingRequest, body)
    embedding_params(request)
    parse_prompts(request.input, name="input", most=2048, max_model_len=10_000)


def read_pooling(body: Mapping[str, Any]) -> None:
    request = parse_body(PoolingRequest, body)
    pooling_params(request, ("embed",))
    parse_prompts(request.input, name="input", most=2048, max_model_len=10_000)


def read_score(body: Mapping[str, Any]) -> None:
    request = parse_body(ScoreRequest, body)
    score_params(request)
    pair_up(request)


READERS: Final[dict[str, Any]] = {
    "ChatRequest": read_chat,
    "CompletionRequest": read_completion,
    "EmbeddingRequest": read_embedding,
    "PoolingRequest": read_pooling,
    "ScoreRequest": read_score,
}
GOOD: Final[dict[str, dict[str, Any]]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "Hi"}]},
    "CompletionRequest": {"prompt": "Hi"},
    "EmbeddingRequest": {"input": "Hi"},
    "PoolingRequest": {"input": "Hi"},
    "ScoreRequest": {"text_1": "Hi", "text_2": "Ho"},
}
FIELDS: Final = sorted({(name, field) for name in READERS for field in SCHEMAS[name]["properties"]})


def is_read(name: str, body: Mapping[str, Any]) -> bool:
    try:
        fields = parse_json_object(json.dumps(body).encode(), None)
        READERS[name](fields)
        timeout_of(None, fields.get("timeout"), 0)
    except InvalidRequestError:
        return False
    return True


def check(name: str, body: dict[str, Any]) -> None:
    """The schema and the server say the same of this body."""
    problems = list(find_problems(body, SCHEMAS[name], SCHEMAS))

    assert (not problems) == is_read(name, body), (name, body, problems)


def with_field(name: str, field: str, value: Any) -> dict[str, Any]:
    body = {**GOOD[name], field: value}
    if field == "text_1":
        body["text_2"] = value  # lists of the same length: no schema can ask for that
    return body


# --------------------------------------------------------------------------- values that are worth trying

MESSAGES: Final[list[Any]] = [
    [],
    [{}],
    ["Hi"],
    [None],
    [{"role": "user"}],
    [{"role": "nobody", "content": "x"}],
    [{"role": "assistant"}],
    [{"role": "assistant", "content": None}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "text": "b"}]}],
    [{"role": "user", "content": "x", "name": 1}],
    [{"role": "user", "content": "x", "name": None, "tool_call_id": "t"}],
    [{"role": "assistant", "content": "x", "tool_calls": []}],
    [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
    [{"role": "assistant", "content": "x", "function_call": {}, "audio": 0}],
    [{"role": "user", "content": "x", "unknown": [1]}],
]
VALUES: Final[list[Any]] = [
    *(None, True, False, 0, 0.0, 1, 1.0, 1.5, -1, -1.0, 2, 2.0, 3, 16, 20, 20.0, 21, 128, 129, 0.5, -2, -2.5, 1e300),
    *(86400, 86401, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70),
    *("", "a", "1", "a b", "a\n", "a" * 128, "a" * 129, "x" * 256, "x" * 257, "x" * 1024, "x" * 1025, "é"),
    *("none", "auto", "last", "mean", "embed", "classify", "float", "base64", "float32", "little", "native"),
    *([], [""], ["a"], [1], [1.0], [1.5], [-1], [True], [None], [[]], [[1]], [[1.0]], [["a"]], ["a", 1], ["a", [1]]),
    *([2**31 - 1], [2**31], ["a", ""], ["x" * 256], ["x" * 257], ["x" * 1025], ["a"] * 17, [1] * 129, [1] * 1025),
    *({}, {"1": 1}, {"1": 101}, {"1": None}, {"01": 1}, {"a": 1}, {"a": None}, {"messages": 1}, {"type": "text"}),
    *({"include_usage": True}, {"include_usage": None}, {"include_usage": 1}, {"other": 1}, {"type": "json_object"}),
    *MESSAGES,
]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_schema_takes_of_each_field_what_the_server_takes(name: str, field: str) -> None:
    for value in VALUES:
        check(name, with_field(name, field, value))


PAIRS: Final[list[tuple[str, dict[str, Any]]]] = [
    *[
        ("ChatRequest", {"stream": stream, "stream_options": options})
        for stream in (None, False, True)
        for options in (None, {}, {"include_usage": True})
    ],
    *[
        (name, {"stream": stream, "prompt_logprobs": number})
        for name in ("ChatRequest", "CompletionRequest")
        for stream in (None, False, True)
        for number in (None, 0, 3)
    ],
    *[
        ("ChatRequest", {"logprobs": logprobs, "top_logprobs": top})
        for logprobs in (None, False, True)
        for top in (None, 0, 0.0, 3)
    ],
    *[
        ("ChatRequest", {"continue_final_message": continues, "add_generation_prompt": adds})
        for continues in (None, False, True)
        for adds in (None, False, True)
    ],
    *[("ChatRequest", {"max_tokens": old, "max_completion_tokens": 3}) for old in (None, -1, 0, 2.0, 2**63)],
    *[
        ("CompletionRequest", {"echo": echo, "max_tokens": limit})
        for echo in (None, False, True)
        for limit in (None, 0, 0.0, 1)
    ],
    *[
        ("CompletionRequest", {"echo": True, "logprobs": logprobs, "prompt_logprobs": number})
        for logprobs in (None, -1, 2, 21)
        for number in (None, -1, 1, 21)
    ],
    *[
        ("PoolingRequest", {"task": task, "pooling": pooling, "normalize": normalize})
        for task in (None, "embed", "classify")
        for pooling in (None, "last", "mean")
        for normalize in (None, True, False)
    ],
]


@pytest.mark.parametrize(("name", "fields"), PAIRS, ids=str)
def test_a_schema_says_which_fields_go_together(name: str, fields: dict[str, Any]) -> None:
    check(name, {**GOOD[name], **fields})


@pytest.mark.parametrize("name", READERS)
def test_a_schema_names_what_must_be_there(name: str) -> None:
    check(name, GOOD[name])
    for field in GOOD[name]:
        check(name, {other: value for other, value in GOOD[name].items() if other != field})


SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
TREES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(place=st.sampled_from(FIELDS), value=TREES)
@example(place=("ChatRequest", "messages"), value=[{}])
@example(place=("EmbeddingRequest", "input"), value=[""])
def test_whatever_a_field_holds_the_schema_and_the_server_agree(place: tuple[str, str], value: Any) -> None:
    name, field = place
    check(name, with_field(name, field, value))


# ------------------------------------------------------------------------------------------ the document


def test_every_pattern_of_the_document_is_one_of_ecma_262() -> None:
    patterns = [value for name, value in keywords(DOCUMENT) if name == "pattern" and isinstance(value, str)]
    # There \A and \z stand for letters, and (?P<n>...), (?i), (?>...), \Q and possessive quantifiers are errors.
    foreign = re.compile(r"\\[AZzGQEhHRX]|\(\?[P#>(aiLmsux-]|[*+?}]\+|\[\[:|\\p\{(?!L|Lu|Ll|N)")

    assert len(patterns) >= 6
    assert [pattern for pattern in patterns if foreign.search(pattern)] == []
    assert all(pattern.startswith("^") and pattern.endswith("$") for pattern in patterns)


@pytest.mark.parametrize(("text", "is_an_id"), [("a.B-1_:/+=@", True), ("a" * 128, True), ("a" * 129, False)])
@pytest.mark.parametrize("end", ["", "\n", " ", "é"])
def test_the_pattern_of_request_ids_allows_what_a_header_can_hold(text: str, is_an_id: bool, end: str) -> None:
    body = {**GOOD["ChatRequest"], "request_id": text + end}

    assert is_valid(body, SCHEMAS["ChatRequest"], SCHEMAS) == (is_an_id and not end) == is_read("ChatRequest", body)


# --------------------------------------------------------------------------------------------- answers


def operation(method: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][path][method.lower()]
    return found


def check_answer(reply: Reply, method: str, path: str) -> None:
    """The document describes all of this answer, and nothing that it does not have."""
    responses = operation(method, path)["responses"]
    content = responses.get("200" if reply.status == 200 else str(reply.status), responses["default"])["content"]
    media_type = reply.headers["content-type"].partition(";")[0]
    assert media_type in content
    if media_type == "text/event-stream":
        name = content[media_type]["x-event-data-schema"]["$ref"]
        for chunk in reply.chunks:
            schema = {"$ref": "#/components/schemas/Error"} if "error" in chunk else {"$ref": name}
            assert list(find_problems(chunk, schema, SCHEMAS, is_closed=True)) == []
    elif media_type == "application/json":
        problems = list(find_problems(reply.json, content[media_type]["schema"], SCHEMAS, is_closed=True))
        assert problems == []


OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"prompt_logprobs": 2},
    {"max_tokens": 2},
    {"return_tokens_as_token_ids": True, "logprobs": 2},
    {"logprobs": 0},
    {"echo": True},
    {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"prompt": ["a", "b"], "n": 2},
    {"stop": "b"},
    {"stop_token_ids": [98]},
    {"temperature": 9},
    {"model": "another"},
]


@pytest.mark.parametrize("stream", [None, {}, {"include_usage": True, "continuous_usage_stats": True}], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_document_describes_generated_answers(path: str, stream: dict[str, Any] | None) -> None:
    streaming = {} if stream is None else {"stream": True, "stream_options": stream}
    async with open_fake_llm(answer="abc é") as llm, open_server(llm) as server:
        for options in OPTIONS:
            fields = {**options, **streaming}
            if path == "/v1/chat/completions":
                fields.pop("prompt", None)
                fields.pop("echo", None)
                if "logprobs" in fields:
                    fields |= {"top_logprobs": fields["logprobs"], "logprobs": True}
                reply = await server.chat(**fields)
            else:
                reply = await server.complete(**fields)
            assert reply.status in (200, 400, 404)
            check_answer(reply, "POST", path)


async def test_the_document_describes_a_stream_that_fails() -> None:
    async with open_server(FakeClient("a", EngineGenerateError("row failed"))) as server:
        reply = await server.chat(stream=True)

    assert "error" in reply.chunks[-1]
    check_answer(reply, "POST", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": ""}),
        ("/pooling", {"input": [[1], [2]]}),
        ("/pooling", {"input": "a", "encoding_format": "base64"}),
        ("/pooling", {"input": "a", "task": "classify"}),
        ("/score", {"text_1": "a", "text_2": ["a", "b"]}),
    ],
)
async def test_the_document_describes_answers_with_vectors(path: str, fields: dict[str, Any]) -> None:
    async with open_server(FakeClient()) as server:
        check_answer(await server.call("POST", path, fields), "POST", path)


@pytest.mark.parametrize("state", ["ready", "loading", "recovering", "asleep", "draining", "dead"])
async def test_the_document_describes_what_is_read(state: EngineState) -> None:
    client = FakeClient()
    client.state = EngineStatus(state=state, phase="load", done=1, total=2, reason="because")
    reads = {path for path, operations in DOCUMENT["paths"].items() if "get" in operations}
    assert len(reads) == 8
    async with open_server(client, metrics=PrometheusStatLogger("m"), served_model_names=("one",)) as server:
        for path in reads:
            check_answer(await server.call("GET", path.replace("{name}", "one")), "GET", path)


def test_the_checker_finds_what_a_schema_excludes() -> None:
    answer, error = ({"$ref": f"#/components/schemas/{name}"} for name in ("ChatCompletion", "Error"))
    wrong: list[Any] = [{}, {"id": 1}, {"choices": [{}]}, []]
    for one in wrong:
        assert list(find_problems(one, answer, SCHEMAS, is_closed=True))
    body = {"message": "m", "type": "t", "param": None, "code": 400}
    assert list(find_problems({"error": body}, error, SCHEMAS, is_closed=True)) == []
    assert list(find_problems({"error": body, "more": 1}, error, SCHEMAS, is_closed=True))
    with pytest.raises(ValueError, match="does not know the keyword"):
        list(find_problems(1, {"multipleOf": 2}, SCHEMAS))
