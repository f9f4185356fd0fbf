"""Serving, draining, stopping."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.fake_client import HANG, End, FakeClient
from tests.support.http_server import BOUND_S, CHAT, Connection, open_server
from trio_llm.config import ServerConfig
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.http import serve as serve_module
from trio_llm.frontend.http.serve import serve

CHAT_PATH = "/v1/chat/completions"


async def rest_of(connection: Connection) -> bytes:
    return b"".join([part async for part in connection.body_parts()])


async def test_serving_starts_with_its_urls_and_opens_its_own_listeners() -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(FakeClient(), ServerConfig(port=0), stop=stop, task_status=task_status)

        [url] = await nursery.start(run)
        assert url.startswith("http://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        assert port > 0
        stop.set()

    with pytest.raises(OSError, match="all attempts"):
        await trio.open_tcp_stream("127.0.0.1", port)


async def test_an_idle_server_stops_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server(FakeClient()) as server, server.connect() as idle:
        await idle.request("GET", "/version")
        await idle.reply()
        server.stop.set()

        await idle.wait_closed()
        with trio.fail_after(BOUND_S):
            await server.stopped.wait()

    assert caplog.records == []  # nothing had to be closed by force


async def test_a_stopping_server_does_not_wait_for_what_clients_still_send(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient("a", HANG)
    async with open_server(client, drain_timeout_s=0) as server, server.connect() as connection:
        await connection.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await connection.next_event()).status_code == 200
        await connection.send(b"GET /version HTTP/1.1\r\n")
        await trio.testing.wait_all_tasks_blocked()
        server.stop.set()
        with trio.fail_after(BOUND_S):
            await server.stopped.wait()

    assert "by force" not in caplog.text


async def test_a_running_stream_is_finished_while_new_work_is_refused() -> None:
    go_on = trio.Event()
    client = FakeClient("a", go_on, End("b"))
    async with open_server(client, drain_timeout_s=BOUND_S) as server, server.connect() as connection:
        await connection.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await connection.next_event()).status_code == 200
        server.stop.set()
        with trio.fail_after(BOUND_S):
            while client.state.state != "draining":
                await trio.testing.wait_all_tasks_blocked()

        health = await server.call("GET", "/health")
        refused = await server.chat()
        go_on.set()
        body = await rest_of(connection)
        with trio.fail_after(BOUND_S):
            await server.stopped.wait()

    assert (health.status, health.json["status"]) == (503, "draining")
    assert refused.status == 503
    assert "retry-after" in refused.headers
    assert refused.headers["connection"] == "close"
    assert body.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"stop"' in body


UNFINISHED = {
    "head": b"content-length: 100\r\n\r\n",
    "part": b"content-length: 100\r\ncontent-type: application/json\r\n\r\n{",
    "chunk": b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    "waits for 100": b"content-length: 100\r\nexpect: 100-continue\r\n\r\n",
}


@pytest.mark.parametrize("sent", UNFINISHED)
async def test_a_client_amid_its_body_gets_503_when_the_server_stops(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = trio.Event()
    client = FakeClient("a", go_on, End("b"))
    async with (
        open_server(client, drain_timeout_s=BOUND_S) as server,
        server.connect() as busy,
        server.connect() as slow,
    ):
        await busy.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await busy.next_event()).status_code == 200
        await slow.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + UNFINISHED[sent])
        await trio.testing.wait_all_tasks_blocked()
        server.stop.set()

        seen = b""
        with trio.fail_after(BOUND_S):
            while part := await slow.stream.receive_some():
                seen += part
        assert client.running, "it had to wait for the end of the drain"
        go_on.set()
        assert (await rest_of(busy)).endswith(b"data: [DONE]\n\n")
        with trio.fail_after(BOUND_S):  # `slow` is still open: the client has not closed its side
            await server.stopped.wait()

    head = seen.removeprefix(b"HTTP/1.1 100 \r\n\r\n").lower()
    assert head.startswith(b"http/1.1 503 ")
    assert b"retry-after: " in head
    assert b"connection: close" in head
    assert "by force" not in caplog.text


async def test_a_body_that_begins_in_a_drain_and_does_not_end_is_a_503_too() -> None:
    go_on = trio.Event()
    client = FakeClient("a", go_on, End("b"))
    async with open_server(client, drain_timeout_s=BOUND_S) as server, server.connect() as busy:
        await busy.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await busy.next_event()).status_code == 200
        server.stop.set()
        with trio.fail_after(BOUND_S):
            while client.state.state != "draining":
                await trio.testing.wait_all_tasks_blocked()
        async with server.connect() as slow:
            await slow.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            with trio.fail_after(BOUND_S):
                seen = await slow.stream.receive_some()
        go_on.set()

    assert seen.startswith(b"HTTP/1.1 503 ")


async def test_idle_connections_are_closed_as_soon_as_the_drain_begins() -> None:
    go_on = trio.Event()
    client = FakeClient("a", go_on, End("b"))
    async with (
        open_server(client, drain_timeout_s=BOUND_S) as server,
        server.connect() as busy,
        server.connect() as kept_alive,
        server.connect() as unused,
    ):
        await busy.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await busy.next_event()).status_code == 200
        await kept_alive.request("GET", "/version")
        assert "connection" not in (await kept_alive.reply()).headers
        server.stop.set()

        await kept_alive.wait_closed()
        await unused.wait_closed()
        assert client.running, "the drain is over before the idle connections were closed"
        go_on.set()
        assert (await rest_of(busy)).endswith(b"data: [DONE]\n\n")
        await busy.wait_closed()


async def test_a_request_that_arrives_with_the_stop_is_answered_and_its_connection_closed() -> None:
    go_on = trio.Event()
    async with (
        open_server(FakeClient("a", go_on, End("b")), drain_timeout_s=BOUND_S) as server,
        server.connect() as busy,
        server.connect() as kept_alive,
    ):
        await busy.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await busy.next_event()).status_code == 200
        await kept_alive.request("GET", "/version")
        await kept_alive.reply()
        await trio.testing.wait_all_tasks_blocked()
        # Both are there before any task of the server runs again.
        os.write(kept_alive.stream.socket.fileno(), b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        server.stop.set()

        seen = b""
        with trio.fail_after(BOUND_S):
            while part := await kept_alive.stream.receive_some():
                seen += part
        go_on.set()

    assert seen.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in seen.lower()


@pytest.mark.parametrize("timeout_s", [0, 0.05])
async def test_streams_that_outlast_the_drain_end_with_a_proper_last_event(timeout_s: float) -> None:
    client = FakeClient("a", HANG)
    async with open_server(client, drain_timeout_s=timeout_s) as server, server.connect() as connection:
        await connection.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        assert (await connection.next_event()).status_code == 200
        server.stop.set()

        body = await rest_of(connection)
        await connection.wait_closed()
        with trio.fail_after(BOUND_S):
            await server.stopped.wait()

    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b'"finish_reason":"abort"') == 1
    assert client.running == []


@pytest.mark.parametrize(
    ("path", "body", "num_running"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}, 2),
        ("/v1/completions", {"prompt": "x"}, 1),
        (CHAT_PATH, CHAT, 1),
    ],
)
async def test_whole_answers_that_outlast_the_drain_are_a_503_that_can_be_repeated(
    path: str, body: dict[str, Any], num_running: int
) -> None:
    client = FakeClient("a", HANG)
    async with open_server(client, drain_timeout_s=0) as server, server.connect() as connection:
        await connection.request("POST", path, body)
        with trio.fail_after(BOUND_S):
            while len(client.running) < num_running:
                await trio.testing.wait_all_tasks_blocked()
        server.stop.set()

        reply = await connection.reply()

    assert (reply.status, reply.error["type"]) == (503, "server_error")
    assert int(reply.headers["retry-after"]) > 0
    assert "x-should-retry" not in reply.headers


async def test_a_whole_answer_that_is_aborted_while_the_server_goes_on_is_an_answer() -> None:
    client = FakeClient("a", HANG)
    async with open_server(client) as server, server.connect() as connection:
        await connection.request("POST", CHAT_PATH, {**CHAT, "request_id": "R"})
        with trio.fail_after(BOUND_S):
            await client.entered.wait()
            client.abort("R")
            reply = await connection.reply()

    assert (reply.status, reply.json["choices"][0]["finish_reason"]) == (200, "abort")


async def test_cancelling_the_server_aborts_what_runs() -> None:
    client = FakeClient("a", HANG)
    async with open_server(client) as server, server.connect() as connection:
        await connection.request("POST", CHAT_PATH, {**CHAT, "stream": True})
        await connection.next_event()

    assert client.asked[0].left.is_set()
    assert client.state == EngineStatus(state="ready")


async def wait_send_blocked(server_port: int, connection: Connection) -> None:
    """Wait until the kernel takes no more for a client that does not read, and a task waits for that to change."""
    while True:
        await trio.testing.wait_all_tasks_blocked()
        waits = trio.lowlevel.current_statistics().io_statistics
        assert waits.backend == "epoll"
        if waits.tasks_waiting_write and is_window_closed(server_port, connection.stream.socket.getsockname()[1]):
            return


def is_window_closed(server_port: int, client_port: int) -> bool:
    """The server's kernel holds data and probes for a window that the client has closed: timer 4 of proc(5)."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, timer, *_ = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in (local, remote)]
        if ports == [server_port, client_port]:
            return timer.startswith("04:")
    return False


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "ENDING_S", 0.01)
    monkeypatch.setattr(serve_module, "CLOSING_S", 0.01)
    client = FakeClient(*["word" * 10_000] * 1000, HANG)
    with trio.fail_after(BOUND_S):
        async with open_server(client, drain_timeout_s=0) as server, server.connect() as connection:
            await connection.request("POST", CHAT_PATH, {**CHAT, "stream": True})
            await client.entered.wait()
            await wait_send_blocked(server.port, connection)
            assert len(client.running[0].script) > 1, "the kernel has taken everything"
            if how == "stop":
                server.stop.set()
                await server.stopped.wait()

    assert client.running == []


LOADED = """
import sys
import trio_llm.frontend.http.serve

print(*sorted({name.partition(".")[0] for name in sys.modules} & {"starlette", "pydantic", "fastapi", "torch"}))
"""


def test_the_server_loads_nothing_that_only_routes_need() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=30, check=False)

    assert (ended.returncode, ended.stdout.strip()) == (0, "")
