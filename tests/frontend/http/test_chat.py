"""POST /v1/chat/completions: what goes to the engine and what comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.exchange import Post
from tests.support.fake_client import End, FakeClient, Held
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import Reply, open_server
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
)
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.sampling import RequestOutputKind, SamplingParams

MODEL = "SmolLM2-135M-Instruct"


async def chat(client: FakeClient, **fields: Any) -> Reply:
    async with open_server(client) as server:
        return await server.chat(**fields)


# ------------------------------------------------------------------------------------ what is asked


async def test_fields_that_are_left_out_take_the_defaults() -> None:
    client = FakeClient()
    await chat(client)

    [asked] = client.asked
    assert asked.params == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    assert asked.prompt == [ord(character) for character in "<user>Hi<assistant>"]


async def test_what_the_models_makers_recommend_goes_before_the_defaults_and_after_the_request() -> None:
    client = FakeClient()
    client.model = msgspec.structs.replace(client.model, sampling_defaults={"temperature": 0.2, "top_p": 0.9})
    await chat(client, top_p=0.5)

    [asked] = client.asked
    assert (asked.params.temperature, asked.params.top_p) == (0.2, 0.5)


async def test_every_supported_field_reaches_the_engine() -> None:
    client = FakeClient()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": -3,
        "max_tokens": 7,
        "min_tokens": 2,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"0": -100, "17": 2.5},
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 4,
        "stream": True,
    }
    await chat(client, **fields)

    [asked] = client.asked
    assert asked.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=-3,
        max_tokens=7,
        min_tokens=2,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={0: -100, 17: 2.5},
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
        output_kind=RequestOutputKind.DELTA,
    )


async def test_null_means_the_default_everywhere() -> None:
    client = FakeClient()
    names = "model stream stream_options temperature top_p top_k seed max_tokens min_tokens stop stop_token_ids n "
    names += "tools tool_choice logprobs top_logprobs logit_bias response_format request_id max_completion_tokens"
    reply = await chat(client, **dict.fromkeys(names.split()))

    assert reply.status == 200
    assert client.asked[0].params == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


async def test_max_completion_tokens_wins_over_max_tokens() -> None:
    client = FakeClient()
    await chat(client, max_tokens=3, max_completion_tokens=9)

    assert client.asked[0].params.max_tokens == 9


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_over_the_context_is_refused_by_the_name_that_the_client_used(name: str, stream: bool) -> None:
    limit: dict[str, Any] = {name: 100}
    async with open_fake_llm(max_model_len=100) as fake:
        post = Post(fake.llm, "/v1/chat/completions", stream=stream, **limit)
        await post.run()

    assert post.error["param"] == name
    assert f"and {name} is 100; shorten the prompt or lower {name}" in post.error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_field_that_contradicts_the_limit_tells_its_name_as_the_client_used_it(name: str) -> None:
    limit: dict[str, Any] = {name: 3}
    async with open_fake_llm() as fake:
        post = Post(fake.llm, "/v1/chat/completions", min_tokens=4, **limit)
        await post.run()

    assert (post.error["param"], post.error["message"]) == (
        "min_tokens",
        f"min_tokens (4) must not be above {name} (3)",
    )


async def test_a_prompt_over_the_context_is_not_told_to_lower_a_limit() -> None:
    async with open_fake_llm(max_model_len=10) as fake:
        post = Post(fake.llm, "/v1/completions", prompt=[1] * 10, max_tokens=1)
        await post.run()

    assert post.error["message"].endswith("shorten the prompt")


async def test_a_single_stop_string_is_a_list_of_one() -> None:
    client = FakeClient()
    await chat(client, stop="end")

    assert client.asked[0].params.stop == ("end",)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<system>a\nb",
        ),
        ([{"role": "assistant", "content": None}], "<assistant>"),
        ([{"role": "user", "content": ""}, {"role": "tool", "content": "x", "tool_call_id": "1"}], "<user><tool>x"),
    ],
)
async def test_text_parts_and_missing_text_are_text(messages: list[Any], text: str) -> None:
    client = FakeClient()
    await chat(client, messages=messages)

    assert client.asked[0].prompt == [ord(character) for character in text + "<assistant>"]


async def test_the_last_message_can_be_continued() -> None:
    client = FakeClient()
    await chat(client, continue_final_message=True)

    assert client.asked[0].prompt == [ord(character) for character in "<user>Hi"]


async def test_unknown_and_ignored_fields_are_accepted() -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "something_new": [1, {"a": None}],
    }
    assert (await chat(FakeClient(), **fields)).status == 200


NEUTRAL: dict[str, list[Any]] = {
    "n": [None, 1],
    "best_of": [None, 1],
    "presence_penalty": [0, 0.0, None],
    "frequency_penalty": [0],
    "repetition_penalty": [1, 1.0],
    "min_p": [0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "tools": [[]],
    "functions": [[]],
    "structured_outputs": [{}],
    "tool_choice": ["none", "auto"],
    "bad_words": [[]],
    "echo": [False],
    "return_token_ids": [False],
    "priority": [0],
}


async def test_values_that_change_nothing_are_accepted() -> None:
    async with open_server(FakeClient()) as server:
        for name, values in NEUTRAL.items():
            for value in values:
                assert (await server.chat(**{name: value})).status == 200, (name, value)


# ------------------------------------------------------------------------------------ whole answers


async def test_the_whole_answer_has_every_field_of_its_shape() -> None:
    client = FakeClient("Hel", "lo", End("!", "length"))
    async with open_server(client) as server:
        reply = await server.call(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"x-request-id": "R"},
        )

    answer = reply.json
    assert isinstance(answer.pop("created"), int)
    assert reply.headers["x-request-id"] == "R"
    assert answer == {
        "id": "chatcmpl-R",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello!",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 8,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "metrics": None,
    }


async def test_text_parts_reach_the_model_as_lines_and_an_answer_without_content_as_nothing() -> None:
    client = FakeClient()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    reply = await chat(client, messages=messages)

    assert reply.status == 200
    [asked] = client.asked
    assert asked.prompt == list(b"<user>a\nb<assistant><user>c<assistant>")


async def test_the_id_comes_from_the_header_then_the_body_then_chance() -> None:
    async with open_server(FakeClient()) as server:
        message = {"messages": [{"role": "user", "content": "Hi"}]}
        both = await server.call(
            "POST", "/v1/chat/completions", {**message, "request_id": "body"}, {"x-request-id": "head"}
        )
        body = await server.chat(request_id="body")
        first, second = await server.chat(), await server.chat()

    assert both.json["id"] == "chatcmpl-head"
    assert (body.json["id"], body.headers["x-request-id"]) == ("chatcmpl-body", "body")
    assert first.json["id"] != second.json["id"]
    assert first.json["id"] == f"chatcmpl-{first.headers['x-request-id']}"


async def test_logprobs_have_one_entry_a_token_with_its_alternatives() -> None:
    reply = await chat(FakeClient("é", Held("x"), End("b")), logprobs=True, top_logprobs=2)

    content = reply.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["é", "x", "b"]
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "t0", "logprob": -1.0, "bytes": [116, 48]},
        ],
    }
    assert reply.json["usage"]["completion_tokens"] == len(content)


async def test_the_stop_string_that_matched_is_named() -> None:
    reply = await chat(FakeClient(End("x", "stop", "END")))

    assert reply.json["choices"][0]["stop_reason"] == "END"


# ------------------------------------------------------------------------------------------- streams


async def test_a_stream_is_role_then_text_then_finish_then_done() -> None:
    reply = await chat(FakeClient("Hi", Held("x"), " you", End()), stream=True)

    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    chunks = reply.chunks
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": " you"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("text", ['"quotes" \\ and \n breaks', "emoji 🔥 é", "\x00\x1f\u2028", "data: x\n\ndata: y"])
async def test_any_text_survives_the_framing(text: str) -> None:
    reply = await chat(FakeClient(text, End(text)), stream=True)

    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in reply.chunks) == text * 2


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
async def test_without_include_usage_there_is_no_usage(options: dict[str, bool] | None) -> None:
    reply = await chat(FakeClient(), stream=True, stream_options=options)

    assert not any("usage" in chunk for chunk in reply.chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in reply.chunks)


async def test_include_usage_adds_one_last_chunk_without_choices() -> None:
    reply = await chat(FakeClient("a", Held("b"), End("c")), stream=True, stream_options={"include_usage": True})

    *chunks, last = reply.chunks
    assert not any("usage" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 8,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": None,
    }


async def test_continuous_usage_counts_what_was_sent_up_to_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await chat(FakeClient("a", Held("b"), "c", End("d")), stream=True, stream_options=options)

    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.chunks]
    assert counts == [0, 1, 3, 4, 4]


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    script = ("a", Held("b"), Held("c"), "d", End("e"))
    streamed = await chat(FakeClient(*script), stream=True, logprobs=True, top_logprobs=1)
    whole = await chat(FakeClient(*script), logprobs=True, top_logprobs=1)

    entries = [
        entry
        for chunk in streamed.chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert entries == whole.json["choices"][0]["logprobs"]["content"]
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in streamed.chunks[1:])


# -------------------------------------------------------------------------------------------- errors

ERRORS = [
    (InvalidRequestError("bad ids", "prompt"), 400, "invalid_request_error"),
    (PromptTooLongError(limit=10, num_prompt_tokens=11, max_tokens=None), 400, "invalid_request_error"),
    (EngineGenerateError("row failed"), 500, "server_error"),
    (EngineUnavailableError("draining", retry_after_s=2.5), 503, "server_error"),
    (EngineDeadError("engine gone"), 503, "server_error"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "status", "kind"), ERRORS)
async def test_an_error_of_admission_is_a_status(error: Exception, status: int, kind: str, stream: bool) -> None:
    client = FakeClient()
    client.admission_error = error
    reply = await chat(client, stream=stream)

    assert reply.status == status
    assert reply.error["type"] == kind
    assert reply.error["message"] == str(error)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_output_is_a_status(stream: bool) -> None:
    reply = await chat(FakeClient(EngineGenerateError("row failed")), stream=stream)

    assert (reply.status, reply.error["message"]) == (500, "row failed")


async def test_a_retry_that_makes_sense_is_asked_for_and_others_are_forbidden() -> None:
    client = FakeClient()
    client.admission_error = EngineUnavailableError("draining", retry_after_s=2.5)
    later = await chat(client)
    client.admission_error = EngineGenerateError("row failed")
    never = await chat(client)

    assert later.headers["retry-after"] == "3"
    assert "x-should-retry" not in later.headers
    assert never.headers["x-should-retry"] == "false"


async def test_after_the_engine_s_death_a_client_is_asked_to_come_back_later() -> None:
    client = FakeClient()
    client.state = EngineStatus(state="dead", reason="CUDA error")
    reply = await chat(client)

    assert reply.status == 503
    assert int(reply.headers["retry-after"]) > 0
    assert "x-should-retry" not in reply.headers


async def test_an_error_amid_a_stream_is_an_event_and_the_only_ending() -> None:
    reply = await chat(FakeClient("a", "b", EngineDeadError("engine gone")), stream=True)

    assert reply.status == 200
    *chunks, error = reply.chunks
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3
    assert error == {"error": {"message": "engine gone", "type": "server_error", "param": None, "code": 503}}


async def test_an_unexpected_error_amid_a_stream_tells_nothing_of_the_inside() -> None:
    reply = await chat(FakeClient("a", ZeroDivisionError("secret")), stream=True)

    assert reply.chunks[-1]["error"]["code"] == 500
    assert b"secret" not in reply.body


async def test_a_stream_without_a_finish_reason_ends_with_an_error() -> None:
    reply = await chat(FakeClient("a", "b"), stream=True)
    # The fake runs out of outputs here: the engine must never do that.
    assert reply.chunks[-1]["error"]["code"] == 500


async def test_an_unknown_model_is_a_404_that_lists_the_known_ones() -> None:
    async with open_server(FakeClient(), served_model_names=("one", "two")) as server:
        unknown = await server.chat(model="three")
        known = await server.chat(model="two")
        unnamed = await server.chat(model="")

    assert (unknown.status, unknown.error["param"], unknown.error["type"]) == (404, "model", "not_found_error")
    assert "one, two" in unknown.error["message"]
    assert known.json["model"] == "two"
    assert unnamed.json["model"] == "one"
