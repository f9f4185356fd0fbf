"""Writing over real sockets: schedule points, order, cancellation, dates, and clients that do not read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate, parsedate_to_datetime

import h11
import pytest
import trio
import trio.testing

from tests.support.fake_client import End, FakeClient, Step
from tests.support.http_server import BOUND_S, CHAT, Connection, num_descriptors, open_server, wait_descriptors
from trio_llm.config import ServerConfig
from trio_llm.frontend.http.server import connections, http1, listeners
from trio_llm.frontend.http.server.connections import BYTES_PER_TURN, Connections
from trio_llm.frontend.http.server.listeners import open_listeners
from trio_llm.frontend.http.server.shell import ASGIApp, Message, Receive, Scope, Send

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
MORE_THAN_THE_KERNEL_TAKES = 32 * 1024 * 1024


def piece(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


class StepCounter(trio.abc.Instrument):
    """Counts how often each task is resumed, by its name."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps[task.name] += 1

    @property
    def request_steps(self) -> int:
        """Those of tasks that answer requests."""
        return self.steps["hypercorn.trio.task_group._handle"]


@pytest.fixture
async def counter() -> AsyncIterator[StepCounter]:
    counter = StepCounter()
    trio.lowlevel.add_instrument(counter)
    yield counter
    trio.lowlevel.remove_instrument(counter)


@asynccontextmanager
async def connect_to(app: ASGIApp) -> AsyncIterator[Connection]:
    """A connection to a server that is nothing but connections and `app`."""
    with open_listeners(ServerConfig(port=0)) as taken:
        [listening] = taken.sockets
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Connections(app, ServerConfig()).accept, listener, nursery)
            async with await trio.open_tcp_stream(*listening.getsockname()) as stream:
                yield Connection(stream)
            nursery.cancel_scope.cancel()


# ----------------------------------------------------------------------------------------- schedule points


async def test_a_piece_of_a_stream_resumes_the_task_of_its_request_once(counter: StepCounter) -> None:
    turns = [trio.Event() for _ in range(20)]
    script: list[Step] = [step for turn in turns for step in (turn, "word")]
    async with open_server(FakeClient("first", *script, End())) as server, server.connect() as connection:
        await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        assert isinstance(await connection.next_event(), h11.Response)
        while b"first" not in (await connection.next_event()).data:
            pass
        steps = []
        for turn in turns[:-1]:
            await trio.testing.wait_all_tasks_blocked()
            before = counter.request_steps
            turn.set()
            assert b"word" in (await connection.next_event()).data
            await trio.testing.wait_all_tasks_blocked()
            steps.append(counter.request_steps - before)

    assert steps == [1] * len(steps)


@pytest.mark.parametrize(("num_bytes", "num_steps"), [(BYTES_PER_TURN // 2, 0), (BYTES_PER_TURN * 5 // 4, 1)])
async def test_a_task_that_writes_much_without_waiting_lets_others_run(
    num_bytes: int, num_steps: int, counter: StepCounter
) -> None:
    steps: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        before = counter.request_steps
        for _ in range(32):
            await send(piece(b"x" * (num_bytes // 32)))
        steps.append(counter.request_steps - before)
        await send(piece(b"", is_last=True))

    async with connect_to(app) as connection:
        await connection.send(GET)
        await connection.reply()

    assert steps == [num_steps]


# ------------------------------------------------------------------------------------------------- order


async def test_what_two_tasks_write_is_not_mixed_when_the_kernel_is_full() -> None:
    first, second = b"a" * MORE_THAN_THE_KERNEL_TAKES, b"b" * 1000
    is_full = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, piece(first))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(send, piece(second))
            await trio.testing.wait_all_tasks_blocked()
            is_full.set()
        await send(piece(b"c", is_last=True))

    async with connect_to(app) as connection:
        await connection.send(GET)
        await is_full.wait()
        reply = await connection.reply()

    assert reply.body == first + second + b"c"


# ------------------------------------------------------------------------------------------ cancellation


async def test_a_send_that_is_cancelled_amid_its_piece_closes_the_connection() -> None:
    is_cancelled = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        with trio.CancelScope() as scope_of_send:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, piece(b"a" * MORE_THAN_THE_KERNEL_TAKES))
                await trio.testing.wait_all_tasks_blocked()
                scope_of_send.cancel()
        is_cancelled.set()
        await send(piece(b"b", is_last=True))

    async with connect_to(app) as connection:
        await connection.send(GET)
        with trio.fail_after(BOUND_S):
            await is_cancelled.wait()
        assert isinstance(await connection.next_event(), h11.Response)
        with pytest.raises(h11.RemoteProtocolError, match="incomplete chunked read"):
            [part async for part in connection.body_parts()]


async def test_a_send_in_a_cancelled_scope_sends_nothing_and_closes_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        with trio.CancelScope() as cancelled:
            cancelled.cancel()
            await send(piece(b"a"))
        assert cancelled.cancelled_caught
        await send(piece(b"b", is_last=True))

    async with connect_to(app) as connection:
        await connection.send(GET)
        assert isinstance(await connection.next_event(), h11.Response)
        with pytest.raises(h11.RemoteProtocolError, match="incomplete chunked read"):
            [part async for part in connection.body_parts()]


async def test_a_client_that_leaves_while_the_kernel_is_full_ends_the_send() -> None:
    has_ended = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"a" * MORE_THAN_THE_KERNEL_TAKES))
        has_ended.set()

    async with connect_to(app) as connection:
        await connection.send(GET)
        assert isinstance(await connection.next_event(), h11.Response)
        await trio.testing.wait_all_tasks_blocked()
        await connection.stream.aclose()
        with trio.fail_after(BOUND_S):
            await has_ended.wait()


# ------------------------------------------------------------------------------- clients that do not read


async def test_clients_that_are_cut_off_because_they_do_not_read_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "SEND_STALL_S", 0.1)
    monkeypatch.setattr(connections, "SEND_STALL_S", 0.1)
    client = FakeClient(*["word" * 10_000] * 1000)
    async with open_server(client) as server:
        assert (await server.call("GET", "/v1/models")).status == 200
        before = num_descriptors()
        async with server.connect() as one, server.connect() as two:
            for connection in (one, two):
                await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            with trio.fail_after(BOUND_S):
                while len(client.asked) < 2 or not all(asked.left.is_set() for asked in client.asked):  # noqa: ASYNC110
                    await trio.sleep(0.005)
            await wait_descriptors(before + 2)  # the clients' own

        assert client.running == []
        assert (await server.call("GET", "/v1/models")).status == 200

    [record] = caplog.records
    assert "has read nothing for 0.1 s" in record.getMessage()
    assert "the client at 127.0.0.1:" in record.getMessage()


# ------------------------------------------------------------------------------------------------- dates


def test_a_date_is_formatted_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([784111777.1, 784111777.9, 784111778.0])
    formatted: list[int] = []

    def counting(seconds: int, *, usegmt: bool) -> str:
        formatted.append(seconds)
        return formatdate(seconds, usegmt=usegmt)

    monkeypatch.setattr(http1, "formatdate", counting)
    config = http1.Http1Config(max_body_bytes=1, clock=lambda: next(times))
    dates = [config.response_headers("h11") for _ in range(3)]

    assert dates[0] == dates[1] == [(b"date", b"Sun, 06 Nov 1994 08:49:37 GMT")]
    assert dates[2] == [(b"date", b"Sun, 06 Nov 1994 08:49:38 GMT")]
    assert formatted == [784111777, 784111778]


DATED = {
    "an answer": (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    "no body": (b"HEAD /version HTTP/1.1\r\nhost: x\r\n\r\n", 200),
    "an error": (b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    "a refusal": (b"nonsense\r\n\r\n", 400),
    "a stream": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n"
        b'{"prompt": "a","stream": true}',
        200,
    ),
}


@pytest.mark.parametrize(("request_bytes", "status"), DATED.values(), ids=DATED)
async def test_every_response_has_one_date(request_bytes: bytes, status: int) -> None:
    begin = int(time.time())
    async with open_server(FakeClient()) as server, server.connect() as connection:
        await connection.send(request_bytes)
        seen = b""
        with trio.fail_after(BOUND_S):
            while b"\r\n\r\n" not in seen:
                seen += await connection.stream.receive_some()

    lines = seen.lower().partition(b"\r\n\r\n")[0].split(b"\r\n")
    [date] = [line for line in lines if line.startswith(b"date: ")]
    assert lines[0].startswith(b"http/1.1 %d " % status)
    assert begin <= parsedate_to_datetime(date[6:].decode()).timestamp() <= time.time()
