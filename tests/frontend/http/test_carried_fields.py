"""Fields that say how a request is served and what its answer repeats: priority, tokenization, the prompt's text, the
versions of weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.support.fake_client import FakeClient
from tests.support.http_server import BODIES, BOUND_S, Reply, Server, ask, open_server
from trio_llm.engine.executor.base import LaunchedStep
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.testing import FakeLLM, open_fake_llm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, POOLING, SCORE = "/v1/embeddings", "/pooling", "/score"
GENERATING = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
EACH_PATH = pytest.mark.parametrize("path", list(BODIES))


@asynccontextmanager
async def open_llm_server(**settings: Any) -> AsyncIterator[tuple[FakeLLM, Server]]:
    async with open_fake_llm(**settings) as llm, open_server(cast(FakeClient, llm), dev_mode=True) as server:
        with trio.fail_after(BOUND_S):
            yield llm, server


def good(path: str, **fields: Any) -> dict[str, Any]:
    """A body with a short answer, so that a request without an end does not run on."""
    return fields if path in (EMBEDDINGS, POOLING, SCORE) else {"max_tokens": 5, **fields}


# ----------------------------------------------------------------------------------------- priority


@EACH_PATH
async def test_requests_are_served_by_their_priority(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: dict[int, None] = {}

    async def run(server: Server, priority: int) -> None:
        reply = await server.ask(path, **good(path, priority=priority))
        assert reply.status == 200

    async with open_llm_server(scheduling_policy="priority", max_num_seqs=1) as (llm, server):
        launch = llm._executor.launch

        def note(plan: StepPlan) -> LaunchedStep:
            order.update(dict.fromkeys(chunk.sequence.priority for chunk in plan.chunks))
            return launch(plan)

        monkeypatch.setattr(llm._executor, "launch", note)
        await llm.pause_generation(mode="keep")
        num_waiting = 0
        async with trio.open_nursery() as nursery:
            for priority in (3, 0, -(2**63)):
                nursery.start_soon(run, server, priority)
                num_waiting += 3 if path == SCORE else 1  # of which each text is a request
                while llm.num_waiting < num_waiting:
                    await trio.lowlevel.checkpoint()
            await llm.resume_generation()

    assert list(order) == [-(2**63), 0, 3]


@EACH_PATH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_priority_is_a_400_where_the_policy_is_first_come_first_served(path: str, stream: bool) -> None:
    async with open_llm_server() as (llm, server):
        refused = await server.ask(path, **good(path, priority=1, stream=stream))
        plain = [await server.ask(path, **good(path, priority=priority)) for priority in (0, 0.0, None)]

        assert (refused.status, refused.error["param"]) == (400, "priority")
        assert "--scheduling-policy priority" in refused.error["message"]
        assert [reply.status for reply in plain] == [200] * 3
        await llm.assert_idle()


async def test_a_priority_is_refused_for_each_of_several_prompts_as_one() -> None:
    async with open_llm_server() as (llm, server):
        reply = await server.complete(prompt=["a", "b"], priority=-1)

        assert (reply.status, reply.error["param"]) == (400, "priority")
        await llm.assert_idle()


# -------------------------------------------------------------------------------------- tokenization


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "0123456789"),
        ({"truncate_prompt_tokens": None}, "0123456789"),
        ({"truncate_prompt_tokens": 4}, "6789"),
        ({"truncate_prompt_tokens": 4.0, "truncation_side": "left"}, "6789"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "0123"),
        ({"truncate_prompt_tokens": 4096}, "0123456789"),
        ({"truncate_prompt_tokens": -1}, "0123456789"),
    ],
)
async def test_every_path_cuts_its_prompts(fields: dict[str, Any], kept: str) -> None:
    text = "0123456789"
    async with open_llm_server() as (llm, server):
        replies = [
            await server.complete(prompt=[text, text], max_tokens=2, **fields),
            await server.complete(prompt=list(text.encode()), max_tokens=2, **fields),
            await server.ask(EMBEDDINGS, input=[text, text], **fields),
            await server.ask(POOLING, input=list(text.encode()), **fields),
            await server.ask(SCORE, text_1=text, text_2=[text], **fields),
        ]

        assert [reply.status for reply in replies] == [200] * 5
        assert [request.prompt for request in llm.requests] == [kept] * 8
        assert replies[0].json["usage"]["prompt_tokens"] == 2 * len(kept)


async def test_a_conversation_is_cut_behind_its_template() -> None:
    async with open_llm_server() as (llm, server):
        await server.chat(truncate_prompt_tokens=2, max_tokens=2)
        await server.chat(truncate_prompt_tokens=2, truncation_side="right", max_tokens=2)

        assert [request.prompt for request in llm.requests] == ["i<|assistant|>", "<|user|>H"]


async def test_minus_one_leaves_room_for_the_answer_and_vectors_need_none() -> None:
    long = "x" * 100
    async with open_llm_server(max_model_len=32) as (llm, server):
        assert (await server.complete(prompt=long, max_tokens=5)).status == 400
        assert (await server.complete(prompt=[120] * 100, max_tokens=5)).status == 400
        replies = [
            await server.complete(prompt=long, max_tokens=5, truncate_prompt_tokens=-1),
            await server.complete(prompt=[120] * 100, max_tokens=5, truncate_prompt_tokens=-1),
            await server.complete(prompt=long, truncate_prompt_tokens=-1),
            await server.ask(EMBEDDINGS, input=long, truncate_prompt_tokens=-1),
            await server.ask(POOLING, input=[120] * 100, truncate_prompt_tokens=-1),
        ]

        assert [reply.status for reply in replies] == [200] * 5
        assert [len(request.token_ids) for request in llm.requests] == [27, 27, 16, 32, 32]


@EACH_PATH
async def test_more_tokens_than_the_context_are_a_400_that_names_the_field(path: str) -> None:
    async with open_llm_server(max_model_len=64) as (_, server):
        reply = await server.ask(path, **good(path, truncate_prompt_tokens=65))

    assert (reply.status, reply.error["param"]) == (400, "truncate_prompt_tokens")
    assert "maximum context length is 64" in reply.error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS, POOLING, SCORE])
@pytest.mark.parametrize(("fields", "has_special"), [({}, True), ({"add_special_tokens": False}, False)])
async def test_texts_get_special_tokens_unless_they_are_declined(
    path: str, fields: dict[str, Any], has_special: bool
) -> None:
    client = FakeClient()
    assert (await ask(client, path, **fields)).status == 200

    prompts = [one.prompt for one in client.asked] + [one.prompt for one in client.pooled]
    assert prompts
    assert {one[0] == 1 for one in prompts} == {has_special}


@pytest.mark.parametrize(
    ("fields", "has_special"),
    [({}, False), ({"add_special_tokens": False}, False), ({"add_special_tokens": True}, True)],
)
async def test_conversations_get_special_tokens_only_on_demand(fields: dict[str, Any], has_special: bool) -> None:
    client = FakeClient()
    assert (await ask(client, CHAT, **fields)).status == 200

    assert (client.asked[0].prompt[0] == 1) == has_special


# ---------------------------------------------------------------------------------- the prompt's text


async def test_the_text_of_a_conversation_comes_once() -> None:
    async with open_llm_server(answer="Yes.") as (_, server):
        whole = await server.chat(return_prompt_text=True)
        stream = await server.chat(return_prompt_text=True, return_token_ids=True, stream=True, n=2)
        without = await server.chat()

    assert whole.json["prompt_text"] == "<|user|>Hi<|assistant|>"
    assert [chunk.get("prompt_text") for chunk in stream.chunks] == [
        "<|user|>Hi<|assistant|>",
        *[None] * (len(stream.chunks) - 1),
    ]
    assert "prompt_token_ids" in stream.chunks[0]
    assert without.json["prompt_text"] is None


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"return_token_ids": True}])
async def test_each_choice_of_a_completion_has_the_text_of_its_prompt(extra: dict[str, Any]) -> None:
    fields = {"prompt": ["One", "Two"], "n": 2, "return_prompt_text": True, "max_tokens": 3, **extra}
    async with open_llm_server(answer="Yes.") as (_, server):
        whole = await server.complete(**fields)
        stream = await server.complete(**fields, stream=True)
        ids = await server.complete(prompt=list(b"Hi"), return_prompt_text=True, max_tokens=3)
        without = await server.complete(max_tokens=3)

    assert [choice["prompt_text"] for choice in whole.json["choices"]] == ["One", "One", "Two", "Two"]
    texts: dict[int, list[str]] = {}
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            texts.setdefault(choice["index"], []).extend([choice["prompt_text"]] if "prompt_text" in choice else [])
    assert texts == {0: ["One"], 1: ["One"], 2: ["Two"], 3: ["Two"]}
    assert ids.json["choices"][0]["prompt_text"] == "Hi"
    assert without.json["choices"][0]["prompt_text"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_prompt_that_is_cut_the_answer_repeats_what_is_kept(stream: bool) -> None:
    fields = {
        "prompt": "0123456789", "truncate_prompt_tokens": 3, "echo": True, "return_prompt_text": True, "logprobs": 0,
        "max_tokens": 2,
    }  # fmt: skip
    async with open_llm_server(answer="ab") as (_, server):
        reply = await server.complete(**fields, stream=stream)

    choices = [chunk["choices"][0] for chunk in reply.chunks] if stream else reply.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "789ab"
    assert choices[0]["prompt_text"] == "789"
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------ versions of weights


def versions(reply: Reply, *, is_stream: bool) -> list[Any]:
    """By choice."""
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]] if is_stream else reply.json["choices"]
    ends = [choice for choice in choices if choice["finish_reason"] is not None]
    assert all("weight_versions" not in choice for choice in choices if choice["finish_reason"] is None)
    return [choice.get("weight_versions") for choice in sorted(ends, key=lambda choice: int(choice["index"]))]


@GENERATING
@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_says_which_weights_computed_it(path: str, stream: bool, tmp_path: Path) -> None:
    asked = good(path, n=2, stream=stream, ignore_eos=True, return_weight_versions=True)
    async with open_llm_server() as (llm, server):
        before = await server.ask(path, **asked)
        await llm.update_weights(str(tmp_path), version="200")
        after = await server.ask(path, **asked)
        without = await server.ask(path, **good(path, stream=stream))

    assert versions(before, is_stream=stream) == [[{"version": "default", "start": 0, "end": 5}]] * 2
    assert versions(after, is_stream=stream) == [[{"version": "200", "start": 0, "end": 5}]] * 2
    assert versions(without, is_stream=stream) == [None]


async def test_weights_that_change_within_an_answer_are_two_spans_of_it(tmp_path: Path) -> None:
    replies: list[Reply] = []

    async def run(server: Server) -> None:
        replies.append(await server.complete(max_tokens=60, ignore_eos=True, stream=True, return_weight_versions=True))

    async with open_llm_server() as (llm, server), trio.open_nursery() as nursery:
        nursery.start_soon(run, server)
        while not any(r.state.num_tokens > 5 for r in llm._registry.in_flight.values()):
            await trio.lowlevel.checkpoint()
        await llm.update_weights(str(tmp_path), version="200")

    [[first, second]] = versions(replies[0], is_stream=True)
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "200", 60)
    assert first["end"] == second["start"]


# ------------------------------------------------------------------------------------- the document


@pytest.mark.parametrize(
    "name", ["ChatRequest", "CompletionRequest", "EmbeddingRequest", "PoolingRequest", "ScoreRequest"]
)
def test_the_document_has_the_fields_of_every_request(name: str) -> None:
    properties = openapi_document("1")["components"]["schemas"][name]["properties"]

    assert {"priority", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"} <= set(properties)
    if name in ("ChatRequest", "CompletionRequest"):
        assert {"return_prompt_text", "return_weight_versions"} <= set(properties)


@pytest.mark.parametrize("name", ["ChatChoice", "ChatChunkChoice", "CompletionChoice", "CompletionChunkChoice"])
def test_the_document_has_the_versions_of_weights_of_every_choice(name: str) -> None:
    schemas = openapi_document("1")["components"]["schemas"]

    assert schemas[name]["properties"]["weight_versions"]["items"] == {"$ref": "#/components/schemas/WeightVersionSpan"}
    assert set(schemas["WeightVersionSpan"]["properties"]) == {"version", "start", "end"}
