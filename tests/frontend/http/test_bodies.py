"""Bodies: caps, deadlines, and what is not JSON."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.support.exchange import Exchange
from tests.support.fake_client import FakeClient
from tests.support.http_server import (
    BOUND_S,
    Connection,
    Reply,
    Server,
    num_descriptors,
    open_server,
    wait_descriptors,
)
from trio_llm.config import ServerConfig
from trio_llm.frontend.http.server import connections
from trio_llm.frontend.http.server.shell import Receive, Scope, Send

JSON = {"content-type": "application/json"}
MIB = 1024 * 1024


async def post(server: Server, body: bytes, headers: dict[str, str] | None = None) -> Reply:
    return await server.call("POST", "/v1/chat/completions", body, JSON if headers is None else headers)


async def test_a_body_over_the_cap_is_a_413_and_the_connection_closes() -> None:
    async with open_server(FakeClient(), max_body_bytes=1000) as server, server.connect() as connection:
        await connection.request("POST", "/v1/chat/completions", b" " * 1001, JSON)
        reply = await connection.reply()
        assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
        assert "1000 bytes" in reply.error["message"]
        assert reply.headers["connection"] == "close"

        await connection.wait_closed()


async def test_a_body_declared_over_the_cap_is_refused_before_it_is_sent() -> None:
    async with open_server(FakeClient(), max_body_bytes=1000) as server, server.connect() as connection:
        await connection.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\nexpect: 100-continue\r\n\r\n"
        )

        assert await status_line(connection) == b"HTTP/1.1 413 "


async def test_a_client_with_a_body_within_the_cap_gets_a_100() -> None:
    body = b'{"prompt": "Once"}'
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(body)
        )
        assert await status_line(connection) == b"HTTP/1.1 100 "
        await connection.send(body)

        assert await status_line(connection) == b"HTTP/1.1 200 "


async def test_a_client_that_sends_nothing_after_its_413_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.01)
    async with open_server(FakeClient(), max_body_bytes=1000) as server:
        before = num_descriptors()
        async with server.connect() as connection:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")
            assert await status_line(connection) == b"HTTP/1.1 413 "

            await wait_descriptors(before + 1)  # the client's own


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/nowhere", "/health"])
async def test_a_body_of_many_pieces_over_the_cap_is_a_413_on_every_path(path: str) -> None:
    async with open_server(FakeClient(), max_body_bytes=100_000) as server:
        reply = await server.call("POST", path, b"x" * (4 * MIB))

        assert reply.status == 413
        assert (await server.chat()).status == 200


async def test_a_chunked_body_over_the_cap_is_a_413() -> None:
    async with open_server(FakeClient(), max_body_bytes=1000) as server, server.connect() as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(30):
            await connection.send(b"64\r\n" + b"y" * 100 + b"\r\n")
        await connection.send(b"0\r\n\r\n")

        assert await status_line(connection) == b"HTTP/1.1 413 "


async def test_a_body_at_the_cap_is_read() -> None:
    async with open_server(FakeClient(), max_body_bytes=1000) as server:
        reply = await post(server, b'{"messages": [{"role": "user", "content": "Hi"}]}'.ljust(1000))

        assert reply.status == 200


async def test_a_body_that_never_ends_gets_its_413_and_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_BYTES", MIB)
    async with open_server(FakeClient(), max_body_bytes=1000) as server, server.connect() as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")

        async def push() -> None:
            with trio.fail_after(BOUND_S):
                try:
                    while True:
                        await connection.stream.send_all(b"z" * 65536)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # closed by the server

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            assert await status_line(connection) == b"HTTP/1.1 413 "

        assert (await server.chat()).status == 200


async def test_a_refused_body_that_goes_on_coming_does_not_block_the_end() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("not reached")

    # The server's reader waits for room in the queue, and so does its announcement that the exchange is over.
    exchange = Exchange(app, body=None, config=ServerConfig(max_body_bytes=10), headers=[(b"content-length", b"999")])
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.feed_endlessly)
            await trio.testing.wait_all_tasks_blocked()
            await exchange.run()
            nursery.cancel_scope.cancel()

    assert exchange.status == 413
    assert exchange.headers[b"connection"] == b"close"


async def test_refused_bodies_of_clients_that_leave_hold_no_descriptors() -> None:
    async with open_server(FakeClient(), max_body_bytes=1000) as server:
        assert (await server.chat()).status == 200
        before = num_descriptors()
        for _ in range(20):
            async with server.connect() as connection:
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n"
                await connection.send(head + b"z" * MIB)

        await wait_descriptors(before)


async def status_line(connection: Connection) -> bytes:
    with trio.fail_after(BOUND_S):
        return bytes((await connection.stream.receive_some())[:13])


async def test_a_client_that_does_not_send_its_body_gets_a_408(autojump_clock: trio.testing.MockClock) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("not reached")

    exchange = Exchange(app, body=None, config=ServerConfig(body_timeout_s=60))
    await exchange.run()

    assert trio.current_time() == pytest.approx(60)
    assert exchange.status == 408
    assert exchange.headers[b"connection"] == b"close"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xc4\xe3"}]}',
        rb'{"messages": [{"role": "user", "content": "\udc97"}]}',
        rb'{"\ud800": 1}',
        b"[" * 5000 + b"]" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"messages": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\x00"}]}',
        b'{"messages": []} {}',
    ],
)
async def test_what_is_not_a_json_object_is_a_400(body: bytes) -> None:
    async with open_server(FakeClient()) as server:
        reply = await post(server, body)

        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert (await server.chat()).status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "json"])
async def test_another_content_type_is_a_400_that_names_it(content_type: str) -> None:
    async with open_server(FakeClient()) as server:
        reply = await post(server, b'{"messages": [{"role": "user", "content": "Hi"}]}', {"content-type": content_type})

        assert reply.status == 400
        assert "application/json" in reply.error["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_json_by_another_name_is_read(content_type: str) -> None:
    async with open_server(FakeClient()) as server:
        reply = await post(server, b'{"messages": [{"role": "user", "content": "Hi"}]}', {"content-type": content_type})

        assert reply.status == 200
