"""Connections over real sockets: who has left, what may be pipelined, what is refused, and how many are taken."""

from __future__ import annotations

import errno
import json
import logging
import resource
import socket
import struct
from collections import deque
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypercorn.events import RawData
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext

from tests.support.fake_client import HANG, End, FakeClient
from tests.support.http_server import (
    BOUND_S,
    CHAT,
    Connection,
    Server,
    num_descriptors,
    open_server,
    wait_descriptors,
)
from trio_llm.config import ServerConfig
from trio_llm.errors import ConfigError
from trio_llm.frontend.http.server import connections, http1
from trio_llm.frontend.http.server.connections import Connections
from trio_llm.frontend.http.server.http1 import HYPERCORN_VERSION, check_hypercorn
from trio_llm.frontend.http.server.shell import Receive, Scope, Send
from trio_llm.version import __version__

GET_VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
VERSION_BODY = b'{"version":"%s"}' % __version__.encode()


def post_chat(*, extra: bytes = b"", **fields: Any) -> bytes:
    body = json.dumps({**CHAT, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + extra + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def read_until(connection: Connection, mark: bytes, *, count: int = 1) -> bytes:
    seen = b""
    with trio.fail_after(BOUND_S):
        while seen.count(mark) < count:
            part = await connection.stream.receive_some()
            assert part, seen
            seen += part
    return seen


async def wait_entered(client: FakeClient) -> None:
    with trio.fail_after(BOUND_S):
        await client.entered.wait()


class _Listener:
    """Plays what `accept` does in turn, then waits for ever."""

    def __init__(self, *turns: BaseException | trio.SocketStream) -> None:
        self.turns = deque(turns)

    async def accept(self) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        if not self.turns:
            await trio.sleep_forever()
        turn = self.turns.popleft()
        if isinstance(turn, BaseException):
            raise turn
        return turn

    async def __aenter__(self) -> _Listener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


def fake_listener(*turns: BaseException | trio.SocketStream) -> trio.SocketListener:
    fake: Any = _Listener(*turns)
    listener: trio.SocketListener = fake
    return listener


def tcp_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for one in (ours, theirs):
        one.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(ours)), trio.SocketStream(
        trio.socket.from_stdlib_socket(theirs)
    )


# ------------------------------------------------------------------------------------- clients that leave

BEHIND = {
    "blank line": b"\r\n",
    "nonsense": b"hello",
    "request": GET_VERSION,
    "100 kB": b"x" * 100_000,
    "more than is kept": b"x" * (http1.MAX_BYTES_BEHIND + 100_000),
}


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("connection_header", [b"", b"connection: close\r\n", b"upgrade: x\r\n"])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
async def test_bytes_behind_a_request_do_not_hide_that_the_client_leaves(
    behind: bytes, connection_header: bytes, how: str
) -> None:
    client = FakeClient(HANG)
    async with open_server(client) as server:
        before = num_descriptors()
        async with server.connect() as connection:
            await connection.send(post_chat(extra=connection_header))
            await wait_entered(client)
            await connection.send(behind)
            await trio.testing.wait_all_tasks_blocked()
            if how == "reset":
                connection.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with trio.fail_after(BOUND_S):
            await client.asked[0].left.wait()
        await wait_descriptors(before)


async def test_bytes_in_one_packet_with_the_request_do_not_hide_that_the_client_leaves() -> None:
    client = FakeClient(HANG)
    async with open_server(client) as server:
        before = num_descriptors()
        async with server.connect() as connection:
            await connection.send(post_chat() + post_chat())
            await wait_entered(client)

        await wait_descriptors(before)
        assert len(client.asked) == 1


@pytest.mark.parametrize("sent", [b"", b"GET /ver", GET_VERSION], ids=["nothing", "half a head", "request"])
async def test_connections_that_clients_close_hold_no_descriptors(sent: bytes) -> None:
    async with open_server(FakeClient()) as server:
        before = num_descriptors()
        for _ in range(20):
            async with server.connect() as connection:
                await connection.send(sent)
                if sent == GET_VERSION:
                    await read_until(connection, VERSION_BODY)
                await trio.testing.wait_all_tasks_blocked()  # the connection is idle

        await wait_descriptors(before)


async def test_the_descriptor_of_a_client_that_has_left_does_not_wait_for_the_app() -> None:
    started = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        before = num_descriptors()
        ours, theirs = tcp_pair()
        nursery.start_soon(Connections(app, ServerConfig()).accept, fake_listener(theirs), nursery)
        await ours.send_all(GET_VERSION)
        with trio.fail_after(BOUND_S):
            await started.wait()
        await ours.aclose()

        await wait_descriptors(before)
        nursery.cancel_scope.cancel()


async def test_a_client_that_has_only_ended_its_sending_side_has_left() -> None:
    client = FakeClient(HANG)
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(post_chat())
        await wait_entered(client)
        await connection.stream.send_eof()

        await connection.wait_closed()
        with trio.fail_after(BOUND_S):
            await client.asked[0].left.wait()


async def test_an_idle_connection_is_closed_and_one_with_a_request_is_not(mock_clock: trio.testing.MockClock) -> None:
    go_on = trio.Event()
    client = FakeClient("a", go_on, End("b"))
    async with open_server(client) as server, server.connect() as idle, server.connect() as busy:
        await idle.request("GET", "/version")
        await idle.reply()
        await busy.send(post_chat())
        await client.entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(connections.KEEP_ALIVE_S + 1)

        assert await idle.stream.receive_some() == b""
        go_on.set()
        assert (await busy.stream.receive_some()).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------------------------------------- pipelining


async def test_pipelined_requests_are_answered_in_order() -> None:
    go_on = trio.Event()
    client = FakeClient(go_on, End("slow"))
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(post_chat() + GET_VERSION)
        await wait_entered(client)
        await connection.send(b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

        seen = await read_until(connection, b"there is nothing at")

    statuses = [block[:3] for block in seen.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"404"]
    assert seen.index(b"slow") < seen.index(b'"version"')


async def test_many_pipelined_requests_are_all_answered() -> None:
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(GET_VERSION * 200)

        await read_until(connection, b"HTTP/1.1 200", count=200)


@pytest.mark.parametrize("blank", [[b"\r\n"], [b"\r", b"\n"], [b"\r\n\r\n\n"]])
async def test_blank_lines_between_requests_are_no_requests(blank: list[bytes]) -> None:
    go_on = trio.Event()
    client = FakeClient(go_on, End("slow"))
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(post_chat())
        await wait_entered(client)
        for part in blank:  # while it is answered
            await connection.send(part)
            await trio.testing.wait_all_tasks_blocked()
        await connection.send(GET_VERSION)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        await read_until(connection, VERSION_BODY)
        await trio.testing.wait_all_tasks_blocked()
        for part in blank:  # and between
            await connection.send(part)
            await trio.testing.wait_all_tasks_blocked()
        await connection.send(GET_VERSION)

        assert (await read_until(connection, VERSION_BODY)).startswith(b"HTTP/1.1 200")


async def test_more_behind_a_request_than_is_kept_closes_the_connection_after_the_answer() -> None:
    go_on = trio.Event()
    client = FakeClient(go_on, End("slow"))
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(post_chat())
        await wait_entered(client)
        await connection.send(b"x" * (http1.MAX_BYTES_BEHIND + 1))
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

        await read_until(connection, b"slow")
        await connection.wait_closed()


async def test_what_is_kept_behind_a_request_is_bounded() -> None:
    async def app(*_: object) -> None:
        await trio.sleep_forever()

    async def send(event: object) -> None:
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        tasks = TaskGroup()
        await nursery.start(enter_for_ever, tasks)
        protocol = http1.Http1Protocol(
            app,
            http1.Http1Config(max_body_bytes=1),
            WorkerContext(None),
            tasks=tasks,
            addresses=(None, None),
            send=send,
            write=send,
        )
        await protocol.handle(RawData(data=GET_VERSION))
        for _ in range(50):
            await protocol.handle(RawData(data=b"x" * 65536))

        assert 0 < len(protocol.connection.trailing_data[0]) <= http1.MAX_BYTES_BEHIND
        nursery.cancel_scope.cancel()


async def enter_for_ever(tasks: TaskGroup, *, task_status: trio.TaskStatus[None]) -> None:
    async with tasks:
        task_status.started()
        await trio.sleep_forever()


async def test_bytes_behind_the_last_request_of_a_connection_do_not_spoil_its_answer() -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(post_chat(extra=b"connection: close\r\n") + b"nonsense")

        assert (await read_until(connection, b"Hello")).startswith(b"HTTP/1.1 200")
        await connection.wait_closed()


async def test_the_next_request_may_come_while_the_last_answer_ends() -> None:
    # A client can be quicker than the task that has just answered it, with more than is received at once.
    async with open_server(FakeClient(), max_body_bytes=300_000) as server, server.connect() as connection:
        for _ in range(20):
            await connection.request("POST", "/v1/chat/completions", b" " * 300_000, {"content-type": "text/x"})
            assert (await connection.reply()).status == 400


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "both lengths": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked",
        400,
    ),
    "chunks in HTTP/1.0": (b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked", 400),
    "two lengths": (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4", 400),
    "a coding": (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip", 501),
    "no host": (b"GET /version HTTP/1.1", 400),
    "nonsense": (b"nonsense", 400),
    "many headers": (b"GET /version HTTP/1.1\r\nhost: x" + b"\r\na: b" * 100, 431),
    "a long header": (b"GET /version HTTP/1.1\r\nhost: x\r\na: " + b"x" * 200_000, 431),
    "a long header at once": (b"GET /version HTTP/1.1\r\nhost: x\r\na: " + b"x" * http1.MAX_HEAD_BYTES, 431),
    "a long target": (b"GET /" + b"x" * http1.MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x", 431),
    "HTTP/0.9": (b"GET /version HTTP/0.9\r\nhost: x", 505),
    "HTTP/2.0": (b"GET /version HTTP/2.0\r\nhost: x", 505),
    "HTTP/3.0": (b"GET /version HTTP/3.0\r\nhost: x", 505),
}


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize(("head", "status"), REFUSED.values(), ids=REFUSED)
async def test_a_request_that_is_not_fit_to_be_read_gets_an_error_and_a_closed_connection(
    head: bytes, status: int, is_pipelined: bool
) -> None:
    go_on = trio.Event()
    client = FakeClient(go_on, End("slow"))
    async with open_server(client) as server, server.connect() as connection:
        if is_pipelined:
            await connection.send(post_chat())
            await wait_entered(client)
        await connection.send(head + b"\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

        seen = await read_until(connection, b'"code"')
        await connection.wait_closed()

    assert seen.count(b"HTTP/1.1 ") == 1 + is_pipelined
    shown, _, body = seen[seen.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert shown.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in shown.lower()
    assert b"x-request-id: " in shown.lower()
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (status, "invalid_request_error")


async def test_a_request_with_as_many_headers_as_are_allowed_is_answered() -> None:
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (http1.MAX_HEADERS - 1) + b"\r\n")

        assert (await read_until(connection, b"}")).startswith(b"HTTP/1.1 200")


async def test_a_refusal_has_the_clients_request_id_and_no_body_for_head() -> None:
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(b"HEAD /version HTTP/3.0\r\nx-request-id: mine\r\n\r\n")

        seen = await read_until(connection, b"\r\n\r\n")
        await connection.wait_closed()

    assert b"x-request-id: mine\r\n" in seen
    assert seen.endswith(b"\r\n\r\n")


async def test_a_body_that_breaks_off_into_nonsense_is_refused() -> None:
    client = FakeClient()
    async with open_server(client) as server, server.connect() as connection:
        await connection.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense\r\n"
        )

        assert (await read_until(connection, b'"code":400')).startswith(b"HTTP/1.1 400")
        await connection.wait_closed()
        await server.call("GET", "/version")

    assert client.asked == []


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/version", 200),
        ("HTTPS://x:80/version?a=b", 200),
        ("http://x/nowhere://y/version", 404),
        ("http://x", 404),
        ("http://x?/version", 404),
        ("/version?a=http://x/y", 200),
        ("ftp://x/version", 404),
    ],
)
async def test_a_target_may_be_absolute(target: str, status: int) -> None:
    async with open_server(FakeClient()) as server:
        assert (await server.call("GET", target)).status == status


@pytest.mark.parametrize(
    "offer",
    [
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: \r\n",
    ],
)
async def test_an_offer_to_upgrade_is_ignored(offer: bytes) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n"
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(request + request)

        seen = await read_until(connection, VERSION_BODY, count=2)

    assert seen.startswith(b"HTTP/1.1 200")
    assert b"connection:" not in seen.lower()


async def test_a_client_of_http_2_is_asked_for_http_1_1() -> None:
    async with open_server(FakeClient()) as server, httpx.AsyncClient(http1=False, http2=True) as http:
        before = num_descriptors()
        with pytest.raises(httpx.RemoteProtocolError, match="error_code:13.*" + b"use HTTP/1.1".hex()):
            await http.get(f"{server.url}/version")

        await wait_descriptors(before)


def test_another_hypercorn_is_an_error_that_says_which_to_install() -> None:
    check_hypercorn(HYPERCORN_VERSION)

    with pytest.raises(ImportError, match=r"found 0\.18\.1.*pip install hypercorn==0\.18\.0"):
        check_hypercorn("0.18.1")


# -------------------------------------------------------------------------------------------------- limits


async def is_refused(server: Server) -> bool:
    """Whether a new connection is closed at once, without an answer."""
    async with server.connect() as connection:
        with trio.fail_after(BOUND_S):
            try:
                await connection.stream.send_all(GET_VERSION)
                return await connection.stream.receive_some() == b""
            except trio.BrokenResourceError:
                return True


async def test_connections_over_the_limit_are_closed_at_once_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server(FakeClient(), max_connections=2) as server:
        before = num_descriptors()
        async with server.connect() as one, server.connect() as two:
            for connection in (one, two):
                await connection.request("GET", "/version")
                await connection.reply()

            assert [await is_refused(server) for _ in range(5)] == [True] * 5
        await wait_descriptors(before)

        assert not await is_refused(server)

    assert [record.getMessage() for record in caplog.records] == ["2 connections are open; no more are taken"]


@pytest.mark.parametrize(("descriptors", "num_taken"), [(66, 2), (10, 1), (resource.RLIM_INFINITY, 3)])
async def test_no_more_connections_are_taken_than_there_are_descriptors(
    descriptors: int, num_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    async with open_server(FakeClient(), max_connections=3) as server, AsyncExitStack() as stack:
        for _ in range(num_taken):
            taken = await stack.enter_async_context(server.connect())
            await taken.request("GET", "/version")
            await taken.reply()

        assert await is_refused(server)


def test_a_limit_of_connections_is_more_than_0() -> None:
    with pytest.raises(ConfigError, match="max_connections"):
        ServerConfig(max_connections=0)


async def test_a_lack_of_descriptors_is_waited_out_and_logged_rarely(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("not reached")

    ours, theirs = tcp_pair()
    listener = fake_listener(*[OSError(errno.EMFILE, "Too many open files")] * 150, theirs)
    async with ours, trio.open_nursery() as nursery:
        nursery.start_soon(Connections(app, ServerConfig()).accept, listener, nursery)
        await ours.send_all(GET_VERSION.replace(b"1.1", b"3.0"))
        assert (await ours.receive_some()).startswith(b"HTTP/1.1 505")
        nursery.cancel_scope.cancel()

    assert trio.current_time() == pytest.approx(15)
    assert len(caplog.records) == 2
    assert all(record.levelno == logging.WARNING and record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.EHOSTUNREACH])
async def test_a_connection_that_fails_before_it_is_accepted_does_not_end_the_server(number: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("not reached")

    ours, theirs = tcp_pair()
    async with ours, trio.open_nursery() as nursery:
        listener = fake_listener(OSError(number, "failed"), theirs)
        nursery.start_soon(Connections(app, ServerConfig()).accept, listener, nursery)
        await ours.send_all(GET_VERSION.replace(b"1.1", b"3.0"))
        with trio.fail_after(BOUND_S):
            assert (await ours.receive_some()).startswith(b"HTTP/1.1 505")
        nursery.cancel_scope.cancel()


async def test_a_socket_that_does_not_listen_ends_the_server_with_its_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("not reached")

    async with trio.open_nursery() as nursery:
        listener = fake_listener(OSError(errno.EINVAL, "not listening"))
        with pytest.raises(OSError, match="not listening"):
            await Connections(app, ServerConfig()).accept(listener, nursery)


RAW = b"\x01zz\xff"
ODD_LINES = {
    "request line": (RAW + b" HTTP/1.1\r\nhost: x\r\n\r\n", 400, "the request line is malformed"),
    "target": (b"GET /" + RAW + b" HTTP/1.1\r\nhost: x\r\n\r\n", 400, "the request line is malformed"),
    "header line": (b"GET / HTTP/1.1\r\nhost: x\r\n" + RAW + b"\r\n\r\n", 400, "a header line is malformed"),
    "header value": (b"GET / HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n", 400, "a header line is malformed"),
    "folded first line": (b"GET / HTTP/1.1\r\n host: x\r\n\r\n", 400, "begins with a space"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "the header Host is missing"),
    "hosts": (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "several Host headers"),
    "length": (
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: " + RAW[1:3] + b"\r\n\r\n",
        400,
        "Content-Length is not",
    ),
    "lengths": (
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        400,
        "contradict each other",
    ),
    "transfer coding": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: zz\r\n\r\n",
        501,
        "the transfer coding is not supported",
    ),
    "chunk header": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        400,
        "must begin with its size",
    ),
    "chunk footer": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{zz\r\n",
        400,
        "does not end where its size says",
    ),
    "long head": (b"GET /" + b"z" * 70_000, 431, "over the limit of 16384 bytes"),
    "long chunk header": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"z" * 70_000,
        400,
        "between two chunks of the body is over the limit of 16384 bytes",
    ),
}


@pytest.mark.parametrize("line", ODD_LINES)
async def test_what_is_not_http_gets_an_error_in_words_and_not_in_the_form_of_python(line: str) -> None:
    sent, status, text = ODD_LINES[line]
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(sent)
        reply = await connection.reply()

    assert reply.status == status
    assert text in reply.error["message"]
    assert not any(form in reply.error["message"] for form in ("bytearray", "b'", "zz", "\\x"))
