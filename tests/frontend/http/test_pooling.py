"""POST /v1/embeddings, /pooling and /score: shapes, order, caps, refusals, and clients that leave."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.exchange import Exchange, Post
from tests.support.fake_client import FakeClient
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import BODIES, BOUND_S, CHAT, COMPLETION, ask, open_server
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import EngineGenerateError, QueueFullError
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.openai.pooling import MAX_INPUTS
from trio_llm.frontend.http.routes import create_routes
from trio_llm.pooling import PoolingParams

EMBEDDINGS, POOLING, SCORE = "/v1/embeddings", "/pooling", "/score"
EACH_PATH = pytest.mark.parametrize("path", [EMBEDDINGS, POOLING, SCORE])


def classifier() -> FakeClient:
    client = FakeClient()
    client.model = msgspec.structs.replace(client.model, tasks=("embed", "classify"))
    return client


# --------------------------------------------------------------------------------------------- shapes


async def test_an_embedding_has_every_field_of_its_shape() -> None:
    client = FakeClient()
    client.vectors[1] = [0.5, -2.0, 0.25]

    reply = await ask(client, EMBEDDINGS, request_id="R", user="somebody")

    answer = reply.json
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "embd-R",
        "object": "list",
        "model": "SmolLM2-135M-Instruct",
        "data": [{"index": 0, "object": "embedding", "embedding": [0.5, -2.0, 0.25]}],
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert reply.headers["x-request-id"] == "R"
    (pooled,) = client.pooled
    assert (pooled.request_id, pooled.prompt, pooled.params) == ("R", [1, *b"Once"], PoolingParams())


async def test_a_pooled_output_has_every_field_of_its_shape() -> None:
    client = classifier()
    client.vectors[1] = [0.25, 0.75]

    answer = (await ask(client, POOLING, request_id="R")).json

    assert (answer["id"], answer["object"]) == ("pool-R", "list")
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [0.25, 0.75]}]
    assert answer["usage"]["prompt_tokens"] == 5
    assert client.pooled[0].params == PoolingParams(task="classify")


async def test_scores_have_every_field_of_their_shape_and_count_every_text() -> None:
    client = FakeClient()
    client.vectors |= {ord("a"): [1.0, 0.0], ord("b"): [0.0, 2.0], ord("c"): [-3.0, 0.0]}

    reply = await ask(client, SCORE, request_id="R", text_1="a", text_2=["a", "b", "c"], add_special_tokens=False)

    answer = reply.json
    assert (answer["id"], answer["object"]) == ("score-R", "list")
    assert answer["data"] == [
        {"index": index, "object": "score", "score": score} for index, score in enumerate((1.0, 0.0, -1.0))
    ]
    assert answer["usage"]["prompt_tokens"] == 4


async def test_scores_of_two_lists_are_of_their_pairs() -> None:
    client = FakeClient()
    client.vectors |= {ord("a"): [1.0, 0.0], ord("b"): [0.0, 2.0]}

    reply = await ask(client, SCORE, text_1=["a", "b"], text_2=["b", "b"], add_special_tokens=False)

    assert [entry["score"] for entry in reply.json["data"]] == [0.0, 1.0]


@pytest.mark.parametrize("path", [EMBEDDINGS, POOLING])
async def test_base64_is_of_little_endian_float32_numbers(path: str) -> None:
    client = FakeClient()
    client.vectors[1] = [0.1, -1e30, 3.0]
    expected = struct.pack("<3f", 0.1, -1e30, 3.0)

    plain = (await ask(client, path, encoding_format="float")).json["data"][0]
    encoded = (await ask(client, path, encoding_format="base64")).json["data"][0]

    name = "embedding" if path == EMBEDDINGS else "data"
    assert base64.b64decode(encoded[name]) == expected
    assert struct.pack("<3f", *plain[name]) == expected


INPUTS: list[tuple[Any, list[list[int]]]] = [
    ("ab", [[1, 97, 98]]),
    (["a", "b"], [[1, 97], [1, 98]]),
    ([5, 6], [[5, 6]]),
    ([[5], [6, 7]], [[5], [6, 7]]),
]


@pytest.mark.parametrize("path", [EMBEDDINGS, POOLING])
@pytest.mark.parametrize(("given", "expected"), INPUTS)
async def test_an_input_has_four_forms(path: str, given: Any, expected: list[list[int]]) -> None:
    client = FakeClient()
    reply = await ask(client, path, input=given, request_id="R")

    assert [entry["index"] for entry in reply.json["data"]] == list(range(len(expected)))
    assert sorted([pooled.prompt for pooled in client.pooled], key=str) == sorted(expected, key=str)
    ids = ["R"] if len(expected) == 1 else [f"R-{index}" for index in range(len(expected))]
    assert {pooled.request_id: pooled.prompt for pooled in client.pooled} == dict(zip(ids, expected, strict=True))
    assert reply.json["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_special_tokens_can_be_left_out() -> None:
    client = FakeClient()
    await ask(client, EMBEDDINGS, input="ab", add_special_tokens=False)

    assert client.pooled[0].prompt == [97, 98]


async def test_all_inputs_are_worked_on_at_once_and_answered_in_their_order() -> None:
    client = FakeClient()
    gates = {token: trio.Event() for token in (10, 11, 12)}
    client.vectors |= gates
    async with open_server(client) as server, server.connect() as connection:
        await connection.request("POST", EMBEDDINGS, {"input": [[10], [11, 11], [12]]})
        with trio.fail_after(BOUND_S):
            while client.num_pooling < 3:
                await trio.testing.wait_all_tasks_blocked()
        for token in (12, 10, 11):
            gates[token].set()
            await trio.testing.wait_all_tasks_blocked()
        reply = await connection.reply()

    assert [entry["index"] for entry in reply.json["data"]] == [0, 1, 2]
    assert reply.json["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (EMBEDDINGS, {"pooling": "mean", "normalize": False}, PoolingParams(pooling="mean", normalize=False)),
        (EMBEDDINGS, {"pooling": None, "normalize": None}, PoolingParams()),
        (POOLING, {}, PoolingParams()),
        (POOLING, {"task": "embed", "pooling": "last"}, PoolingParams(pooling="last")),
        (SCORE, {"pooling": "mean"}, PoolingParams(pooling="mean")),
    ],
)
async def test_fields_become_parameters(path: str, fields: dict[str, Any], expected: PoolingParams) -> None:
    client = FakeClient()
    assert (await ask(client, path, **fields)).status == 200

    assert {pooled.params for pooled in client.pooled} == {expected}


async def test_many_vectors_leave_room_for_other_tasks() -> None:
    client = FakeClient()
    client.vectors[10] = [0.5] * 4096
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await trio.lowlevel.checkpoint()
            num_turns += 1

    exchange = Post(client, EMBEDDINGS, input=[[10]] * 40)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        with trio.fail_after(BOUND_S):
            while len(client.pooled) < 40 or client.num_pooling:
                await trio.lowlevel.checkpoint()
        nursery.start_soon(count_turns)
        with trio.fail_after(BOUND_S):
            while not exchange.is_over:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    assert exchange.status == 200
    assert len(json.loads(exchange.body)["data"]) == 40
    assert num_turns >= 10


# ------------------------------------------------------------------------------------------- refusals


NOT_TEXT: list[Any] = [1, 1.5, True, [], {}]
NOT_BOOLS: list[Any] = ["", "true", 0, 1, [], {}]
BAD_FIELDS: dict[str, list[Any]] = {
    "model": NOT_TEXT,
    "pooling": ["first", "", *NOT_TEXT],
    "add_special_tokens": NOT_BOOLS,
    "timeout": [-1, 0, 86401, "1", True, []],
    "request_id": [*NOT_TEXT, "", "a b", "a" * 129],
    "dimensions": [1, 512, "x"],
    "truncate_prompt_tokens": [0, -2, 4097, 2**64, 1.5, "1", True, []],
    "truncation_side": ["", "middle", 1, []],
    "messages": [{}, [{"role": "user", "content": "x"}]],
    "embed_dtype": ["float16", "bytes", 1],
    "endianness": ["big", 1],
    "use_activation": [False, 1],
    "cache_salt": ["", "x"],
    "priority": [2**63, -(2**63) - 1, 1.5, "1", True, []],
    "mm_processor_kwargs": [{"a": 1}, []],
}
BAD_INPUTS: list[Any] = [
    "", [], [""], [[]], ["a", ""], ["a", [1]], [1, "a"], [1.5], [True], [-1], [2**31], [[1], ["a"]], [[[1]]],
    None, 3, {"a": 1}, ["a"] * (MAX_INPUTS + 1), [[1]] * (MAX_INPUTS + 1),
]  # fmt: skip
BAD_TEXTS: list[Any] = ["", [], [""], [1], [["a"]], 1, None, {}]
ONLY_OF: dict[str, dict[str, list[Any]]] = {
    EMBEDDINGS: {"input": BAD_INPUTS, "encoding_format": ["", "bytes", 1], "normalize": NOT_BOOLS},
    POOLING: {
        "input": BAD_INPUTS, "encoding_format": ["", "bytes", 1], "normalize": NOT_BOOLS, "task": ["score", "", 1, []]
    },
    SCORE: {"text_1": [*BAD_TEXTS, ["a"] * 3], "text_2": [*BAD_TEXTS, ["a"] * MAX_INPUTS]},
}  # fmt: skip


@EACH_PATH
async def test_a_bad_value_is_a_400_that_names_its_field(path: str) -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        for name, values in {**BAD_FIELDS, **ONLY_OF[path]}.items():
            if path == SCORE and name == "task":
                continue
            for value in values:
                if value == "" and name == "model":  # an empty name is the first one
                    continue
                await connection.request("POST", path, {**BODIES[path], name: value})
                reply = await connection.reply()

                shown = f"{name}={str(value)[:50]}"
                assert reply.status == 400, shown
                assert reply.error["param"].split(".")[0] == name, shown
                assert len(reply.error["message"]) < 500, shown
                assert client.pooled == [], shown
        await connection.request("POST", path, BODIES[path])
        assert (await connection.reply()).status == 200


@EACH_PATH
async def test_values_that_change_nothing_are_accepted(path: str) -> None:
    harmless: dict[str, Any] = {
        "dimensions": None, "truncate_prompt_tokens": None, "messages": [], "embed_dtype": "float32",
        "endianness": "little", "use_activation": True, "cache_salt": None, "priority": 0, "mm_processor_kwargs": {},
        "user": "somebody", "no_such_field": [1],
    }  # fmt: skip
    assert (await ask(FakeClient(), path, **harmless)).status == 200


@EACH_PATH
async def test_a_body_without_an_input_is_a_400_that_names_it(path: str) -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.call("POST", path, {"user": "x"})

    assert (reply.status, reply.error["param"]) == (400, "text_1" if path == SCORE else "input")


@pytest.mark.parametrize("path", [EMBEDDINGS, POOLING])
async def test_as_many_inputs_as_the_limit_are_taken(path: str) -> None:
    client = FakeClient()
    reply = await ask(client, path, input=[[5]] * MAX_INPUTS)

    assert reply.status == 200
    assert len(reply.json["data"]) == len(client.pooled) == MAX_INPUTS == 2048


async def test_as_many_texts_to_compare_as_the_limit_are_taken() -> None:
    client = FakeClient()
    reply = await ask(client, SCORE, text_1="a", text_2=["b"] * (MAX_INPUTS - 1))

    assert len(reply.json["data"]) == MAX_INPUTS - 1
    assert len(client.pooled) == MAX_INPUTS


async def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    client = FakeClient()
    most = client.model.max_model_len

    assert (await ask(client, EMBEDDINGS, input=[5] * most)).status == 200
    reply = await ask(client, EMBEDDINGS, input=[5] * (most + 1))

    assert reply.status == 400
    assert f"maximum context length is {most} tokens" in reply.error["message"]


@pytest.mark.parametrize(
    ("is_classifier", "path", "fields", "words"),
    [
        (True, SCORE, {}, "cannot score; it can embed, classify"),
        (True, "/v1/chat/completions", CHAT, "cannot generate"),
        (True, "/v1/completions", COMPLETION, "cannot generate"),
        (False, POOLING, {"task": "classify"}, "cannot classify; it can generate, embed, score"),
    ],
)
async def test_a_task_that_the_model_has_not_is_refused_clearly(
    is_classifier: bool, path: str, fields: dict[str, Any], words: str
) -> None:
    client = classifier() if is_classifier else FakeClient()
    async with open_server(client) as server:
        reply = await server.call("POST", path, {**BODIES.get(path, {}), **fields})

    assert (reply.status, reply.headers["x-should-retry"]) == (501, "false")
    assert words in reply.error["message"]
    assert client.asked == []
    assert client.pooled == []


@EACH_PATH
async def test_an_unknown_model_is_a_404_and_other_methods_a_405(path: str) -> None:
    async with open_server(FakeClient()) as server:
        unknown = await server.call("POST", path, {**BODIES[path], "model": "other"})
        get = await server.call("GET", path)

    assert (unknown.status, unknown.error["param"]) == (404, "model")
    assert (get.status, get.headers["allow"]) == (405, "POST")


@EACH_PATH
async def test_while_it_drains_the_server_takes_no_new_ones(path: str) -> None:
    client = FakeClient()
    client.drain()
    reply = await ask(client, path)

    assert reply.status == 503
    assert "retry-after" in reply.headers


async def test_an_overload_or_a_failure_of_one_is_that_of_the_request_and_the_others_end() -> None:
    for error, status in ((QueueFullError("full"), 429), (EngineGenerateError("row failed"), 500)):
        client = FakeClient()
        client.vectors |= {10: trio.Event(), 11: error, 12: trio.Event()}
        with trio.fail_after(BOUND_S):
            reply = await ask(client, EMBEDDINGS, input=[[10], [11], [12]])

        assert (reply.status, reply.error["message"]) == (status, str(error))
        assert client.num_pooling == 0


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_queued_reqs": 2}, "3 prompts with 3 vectors are more"),
        ({"max_num_queued_tokens": 5}, "6 prompt tokens are more"),
    ],
)
async def test_inputs_that_can_never_all_be_in_are_refused_for_good(limits: dict[str, Any], words: str) -> None:
    client = FakeClient()
    client.config = EngineConfig(**limits)
    reply = await ask(client, EMBEDDINGS, input=[[1, 1]] * 3)

    assert (reply.status, reply.error["param"]) == (400, "input")
    assert words in reply.error["message"]
    assert client.pooled == []


# ------------------------------------------------------------------------------- clients and their time


@EACH_PATH
async def test_a_client_that_leaves_ends_every_vector(path: str) -> None:
    client = FakeClient()
    client.vectors[1] = trio.Event()
    async with open_server(client) as server:
        async with server.connect() as connection:
            fields = {} if path == SCORE else {"input": ["a", "b", "c"]}
            await connection.request("POST", path, {**BODIES[path], **fields})
            with trio.fail_after(BOUND_S):
                while client.num_pooling < 3:
                    await trio.testing.wait_all_tasks_blocked()

        with trio.fail_after(BOUND_S):
            while client.num_pooling:
                await trio.testing.wait_all_tasks_blocked()


@EACH_PATH
async def test_a_request_that_takes_longer_than_it_was_given_is_a_504(path: str, autojump_clock: MockClock) -> None:
    client = FakeClient()
    client.vectors[1] = trio.Event()
    exchange = Post(client, path, timeout=3)
    with trio.fail_after(10):
        await exchange.run()

    assert exchange.status == 504
    assert b"within 3 seconds" in exchange.body
    assert client.num_pooling == 0


async def test_a_drain_that_gives_up_ends_vectors_with_a_503(autojump_clock: MockClock) -> None:
    async with open_fake_llm() as fake:
        running = RunningRequests()
        exchange = Exchange(
            create_routes(fake.llm, ServerConfig(), running),
            body=json.dumps({"input": ["a", "b"]}).encode(),
            method="POST",
            path=EMBEDDINGS,
            headers=[(b"content-type", b"application/json")],
            query_string=b"",
        )
        fake.llm.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            await trio.testing.wait_all_tasks_blocked()
            assert len(running.ids()) == 2
            fake.llm.drain()
            assert fake.llm.abort(running.ids()) == 2

        assert exchange.status == 503
        assert running.ids() == []


@EACH_PATH
async def test_cancelling_at_every_checkpoint_leaves_nothing_behind(path: str) -> None:
    async with open_fake_llm() as fake:

        async def work() -> None:
            exchange = Post(fake.llm, path)
            await exchange.run()
            assert exchange.status == 200

        assert await cancel_at_every_checkpoint(work, fake.assert_nothing_is_left) >= 3


async def test_the_real_engine_s_vectors_come_in_the_order_of_the_inputs() -> None:
    async with open_fake_llm(embedding_size=4) as fake:
        texts = [f"text {index}" for index in range(30)]
        expected = [(await fake.llm.encode(text)).data for text in texts]
        exchange = Post(fake.llm, EMBEDDINGS, input=texts, encoding_format="base64")
        await exchange.run()

        data = json.loads(exchange.body)["data"]
        assert [base64.b64decode(entry["embedding"]) for entry in data] == expected
        await fake.assert_nothing_is_left()
