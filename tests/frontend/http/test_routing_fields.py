"""A request over HTTP says which of several engines it wants, by headers or fields."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_client import FakeClient
from tests.support.http_server import open_server
from trio_llm.frontend.requests.balancing import MAX_SESSION_ID_CHARS, Routing
from trio_llm.testing import open_fake_llm

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": [1, 2]},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, Routing()),
        ({"data_parallel_rank": 3, "session_id": "s"}, {}, Routing(data_parallel_rank=3, session_id="s")),
        ({"data_parallel_rank": None, "session_id": None}, {}, Routing()),
        ({}, {"X-data-parallel-rank": "0"}, Routing(data_parallel_rank=0)),
        ({}, {"X-Session-ID": "s"}, Routing(session_id="s")),
        (
            {"data_parallel_rank": 3, "session_id": "field"},
            {"x-data-parallel-rank": "1", "x-session-id": "header"},
            Routing(data_parallel_rank=1, session_id="header"),
        ),
    ],
)
async def test_headers_go_before_fields(
    path: str, fields: dict[str, Any], headers: dict[str, str], expected: Routing
) -> None:
    client = FakeClient()
    async with open_server(client) as server:
        reply = await server.call("POST", path, {**PATHS[path], **fields}, headers)

    assert reply.status == 200, reply.body
    assert [asked.routing for asked in client.asked] + [asked.routing for asked in client.pooled] == [expected]


async def test_each_prompt_of_a_list_goes_there() -> None:
    client = FakeClient()
    async with open_server(client) as server:
        await server.call("POST", "/v1/completions", {"prompt": ["a", "b"], "data_parallel_rank": 1})

    assert [asked.routing for asked in client.asked] == [Routing(data_parallel_rank=1)] * 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"data_parallel_rank": -1}, {}, "data_parallel_rank"),
        ({"data_parallel_rank": "1"}, {}, "data_parallel_rank"),
        ({"data_parallel_rank": True}, {}, "data_parallel_rank"),
        ({"data_parallel_rank": 10**6}, {}, "data_parallel_rank"),
        ({"session_id": ""}, {}, "session_id"),
        ({"session_id": "x" * (MAX_SESSION_ID_CHARS + 1)}, {}, "session_id"),
        ({}, {"X-data-parallel-rank": "-1"}, "x-data-parallel-rank"),
        ({}, {"X-data-parallel-rank": "first"}, "x-data-parallel-rank"),
        ({}, {"X-data-parallel-rank": "9" * 30}, "x-data-parallel-rank"),
    ],
)
async def test_what_is_no_rank_or_no_session_is_400(
    path: str, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.call("POST", path, {**PATHS[path], **fields}, headers)

    assert (reply.status, reply.json["error"]["param"]) == (400, param)


async def test_a_rank_that_the_server_has_not_is_400_before_a_stream_begins() -> None:
    async with open_fake_llm(num_engines=2, answer="Hi") as llm, open_server(llm) as server:
        body = {**PATHS["/v1/completions"], "stream": True}
        refused = await server.call("POST", "/v1/completions", {**body, "data_parallel_rank": 2})
        taken = await server.call("POST", "/v1/completions", {**body, "data_parallel_rank": 1})

    assert (refused.status, refused.json["error"]["param"]) == (400, "data_parallel_rank")
    assert taken.status == 200
    assert [request.rank for request in llm.requests] == [1]
