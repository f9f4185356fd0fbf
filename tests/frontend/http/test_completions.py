"""POST /v1/completions: one prompt or several, streamed or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_client import End, FakeClient, Held
from tests.support.http_server import Reply, open_server
from trio_llm.errors import EngineGenerateError


async def complete(client: FakeClient, **fields: Any) -> Reply:
    async with open_server(client) as server:
        return await server.complete(**fields)


async def test_without_max_tokens_16_are_generated() -> None:
    client = FakeClient()
    await complete(client)

    assert client.asked[0].params.max_tokens == 16
    assert client.asked[0].prompt == [1, *b"Once"]


async def test_without_max_tokens_a_prompt_that_leaves_less_room_gets_what_there_is() -> None:
    client = FakeClient()
    reply = await complete(client, prompt=[5] * (client.model.max_model_len - 3))

    assert reply.status == 200
    assert client.asked[0].params.max_tokens == 3


async def test_min_tokens_up_to_the_default_limit_need_no_max_tokens() -> None:
    client = FakeClient()
    reply = await complete(client, min_tokens=16)
    refused = await complete(FakeClient(), min_tokens=17)
    room = client.model.max_model_len - 3
    short = await complete(FakeClient(), min_tokens=4, prompt=[5] * room)

    assert (reply.status, client.asked[0].params.min_tokens) == (200, 16)
    assert [one.error["message"] for one in (refused, short)] == [
        "min_tokens (17) must not be above max_tokens (16)",
        "min_tokens (4) must not be above max_tokens (3)",
    ]


async def test_special_tokens_of_the_prompt_can_be_left_out() -> None:
    client = FakeClient()
    await complete(client, prompt="ab", add_special_tokens=False)

    assert client.asked[0].prompt == [97, 98]


async def test_the_whole_answer_has_every_field_of_its_shape() -> None:
    reply = await complete(FakeClient("Hel", End("lo", "length", None)), request_id="R")

    answer = reply.json
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "cmpl-R",
        "object": "text_completion",
        "model": "SmolLM2-135M-Instruct",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "prompt_text": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
    }


async def test_a_stream_is_text_then_finish_then_done() -> None:
    reply = await complete(FakeClient("a", End("b", "stop", 7)), stream=True)

    assert [chunk["choices"][0] for chunk in reply.chunks] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop", "stop_reason": 7},
    ]
    assert {chunk["object"] for chunk in reply.chunks} == {"text_completion"}


async def test_logprobs_are_columns_and_offsets_count_on_over_chunks() -> None:
    script = ("one", Held("x"), " two", End("!"))
    whole = await complete(FakeClient(*script), logprobs=2)
    streamed = await complete(FakeClient(*script), logprobs=2, stream=True)

    columns = whole.json["choices"][0]["logprobs"]
    assert columns == {
        "text_offset": [0, 3, 4, 8],
        "token_logprobs": [-0.5] * 4,
        "tokens": ["one", "x", " two", "!"],
        "top_logprobs": [{token: -0.5, "t0": -1.0} for token in ("one", "x", " two", "!")],
    }
    for name, column in columns.items():
        joined = [entry for chunk in streamed.chunks for entry in chunk["choices"][0]["logprobs"][name]]
        assert joined == column


PROMPT_LISTS: list[Any] = [["x", "y", "z"], [[1, 2], [3], [4]]]


@pytest.mark.parametrize("prompts", PROMPT_LISTS)
async def test_each_prompt_of_a_list_has_its_own_choice(prompts: list[Any]) -> None:
    client = FakeClient(scripts=[(f"answer {i}", End()) for i in range(3)])
    reply = await complete(client, prompt=prompts, request_id="R")

    assert {asked.request_id: asked.prompt for asked in client.asked} == {
        f"R-{index}": [1, *prompt.encode()] if isinstance(prompt, str) else prompt
        for index, prompt in enumerate(prompts)
    }
    # They are admitted at once, in any order: each answer must stand at the prompt that got it.
    given = {asked.request_id: f"answer {turn}" for turn, asked in enumerate(client.asked)}
    assert [(choice["index"], choice["text"]) for choice in reply.json["choices"]] == [
        (index, given[f"R-{index}"]) for index in range(3)
    ]
    assert reply.json["usage"]["prompt_tokens"] == 15


async def test_streamed_choices_of_a_list_keep_their_index_and_end_once() -> None:
    prompts = [[10], [20], [30]]
    client = FakeClient("a", "b", End("c"))
    reply = await complete(client, prompt=prompts, stream=True, stream_options={"include_usage": True})

    *chunks, usage = reply.chunks
    texts = dict.fromkeys(range(3), "")
    ends = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == {0: "abc", 1: "abc", 2: "abc"}
    assert sorted(ends) == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [True, False])
async def test_when_one_prompt_of_a_list_fails_first_the_request_fails_and_the_others_end(stream: bool) -> None:
    client = FakeClient(scripts=[("hang",), (EngineGenerateError("row failed"),), ("hang",)])
    reply = await complete(client, prompt=["x", "y", "z"], stream=stream)

    assert (reply.status, reply.error["message"]) == (500, "row failed")
    assert client.running == []


async def test_when_one_prompt_of_a_list_fails_later_the_stream_ends_with_its_error() -> None:
    client = FakeClient(scripts=[("a", EngineGenerateError("row failed")), ("b", "hang")])
    reply = await complete(client, prompt=["x", "y"], stream=True)

    assert reply.status == 200
    assert reply.chunks[-1]["error"]["message"] == "row failed"
    assert client.running == []


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", [1]],
        [1, "a"],
        [1.5],
        [True],
        [-1],
        [2**31],
        [[1], ["a"]],
        [[[1]]],
        None,
        3,
        {"a": 1},
        ["a"] * 1025,
        [[1]] * 1025,
    ],
)
async def test_what_is_no_prompt_is_a_400_that_names_it(prompt: Any) -> None:
    client = FakeClient()
    async with open_server(client) as server:
        reply = await server.complete(prompt=prompt)

        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert client.asked == []
        assert (await server.complete()).status == 200


async def test_a_request_without_a_prompt_is_a_400_that_names_it() -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.call("POST", "/v1/completions", {"max_tokens": 1})

    assert (reply.status, reply.error["param"], reply.error["message"]) == (400, "prompt", "prompt is missing")
