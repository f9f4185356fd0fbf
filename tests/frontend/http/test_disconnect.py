"""What happens to a request whose client leaves, and to the connection of one that stays."""

from __future__ import annotations

import pytest
import trio

from tests.support.fake_client import HANG, End, FakeClient
from tests.support.http_server import BOUND_S, CHAT, Connection, Server, open_server


async def wait_left(client: FakeClient, index: int = 0) -> None:
    with trio.fail_after(BOUND_S):
        await client.asked[index].left.wait()


async def start(server: Server, connection: Connection, *, stream: bool) -> None:
    """Send a request that hangs, and return once its generation has begun."""
    await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
    with trio.fail_after(BOUND_S):
        await server.client.entered.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_waiting_ends_the_generation(stream: bool) -> None:
    client = FakeClient(HANG)
    async with open_server(client) as server:
        async with server.connect() as connection:
            await start(server, connection, stream=stream)

        await wait_left(client)
        assert client.running == []


async def test_a_client_that_leaves_amid_a_stream_ends_the_generation() -> None:
    client = FakeClient("Hello", HANG)
    async with open_server(client) as server:
        async with server.connect() as connection:
            await start(server, connection, stream=True)
            head = await connection.next_event()
            assert head.status_code == 200
            await connection.next_event()

        await wait_left(client)


async def test_a_client_that_resets_the_connection_ends_the_generation() -> None:
    client = FakeClient("Hello", HANG)
    async with open_server(client) as server, server.connect() as connection:
        await start(server, connection, stream=True)
        connection.stream.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: close() sends RST
        await connection.stream.aclose()

        await wait_left(client)


async def test_a_client_that_leaves_ends_every_prompt_of_its_list() -> None:
    client = FakeClient("a", HANG)
    async with open_server(client) as server:
        async with server.connect() as connection:
            await connection.request("POST", "/v1/completions", {"prompt": ["x", "y", "z"], "stream": True})
            assert (await connection.next_event()).status_code == 200

        with trio.fail_after(BOUND_S):
            await client.wait_idle()
        assert [asked.left.is_set() for asked in client.asked] == [True] * 3


async def test_a_client_that_left_before_its_body_was_whole_costs_nothing() -> None:
    client = FakeClient()
    async with open_server(client) as server:
        async with server.connect() as connection:
            await connection.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 1000\r\n\r\n{"
            )

        assert (await server.chat()).status == 200
        assert len(client.asked) == 1


async def test_others_go_on_when_a_client_leaves() -> None:
    go_on = trio.Event()
    client = FakeClient(scripts=[("a", HANG), ("b", go_on, End("c"))])
    async with open_server(client) as server, server.connect() as stays:
        async with server.connect() as leaves:
            await start(server, leaves, stream=True)
            await stays.request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            assert (await stays.next_event()).status_code == 200
        await wait_left(client)
        go_on.set()

        body = b"".join([part async for part in stays.body_parts()])

        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b'"finish_reason":"stop"') == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_connection_can_be_used_again_after_an_answer(stream: bool) -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        for _ in range(3):
            await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
            assert (await connection.reply()).status == 200

        await connection.request("GET", "/health")
        assert (await connection.reply()).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_is_to_close_closes_after_the_answer(stream: bool) -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": stream}, {"connection": "close"})
        assert (await connection.reply()).status == 200

        await connection.wait_closed()
