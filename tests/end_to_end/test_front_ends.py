"""Several front-end processes over fake engines: clients that are shared out, front ends that die or stand still."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.conftest import fake_engine
from tests.end_to_end.servers import FAKE_ENGINE_COUNT, Server, children_of, is_alive, kill, open_stream, wait_until
from trio_llm.config import ServerConfig

NUM_FRONT_ENDS = 2
NUM_TOKENS = 100
SCRIPT = "abcdefghijklmnopqrstuvwxyz0123456789"


def is_front_end(pid: int) -> bool:
    try:
        return b"trio_llm.supervisor.front_end" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Front:
    """A server with several front ends, and which of them a connection reached."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def pids(self) -> list[int]:
        return [pid for pid in children_of(self.server.process.pid) if is_front_end(pid)]

    @asynccontextmanager
    async def client_of(self, pid: int) -> AsyncIterator[httpx.AsyncClient]:
        """A client whose one connection was accepted by this front end, found by its sockets."""
        limits = httpx.Limits(max_connections=1)
        for _ in range(200):
            async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=limits) as client:
                await client.get("/version")
                if self.owner(client) == pid:
                    yield client
                    return
        raise AssertionError(f"front end {pid} took none of 200 connections")

    def owner(self, client: httpx.AsyncClient) -> int:
        """The front end that has the other end of a client's connection."""
        [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
        port = connection._connection._network_stream.get_extra_info("client_addr")[1]
        local = f"{int(self.server.url.rpartition(':')[2]):04X}"
        [inode] = re.findall(rf":{local} [0-9A-F]+:{port:04X} 01 .*", Path("/proc/net/tcp").read_text())[0:1]
        wanted = f"socket:[{inode.split()[9 - 1]}]"
        [pid] = [pid for pid in self.pids if wanted in links_of(pid)]
        return pid


def links_of(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    FAKE_ENGINE_COUNT.append("several front ends")
    engine = fake_engine(step_s=0.01, script=SCRIPT, credit_steps=32)
    server = Server.from_configs("several front ends", engine, ServerConfig(port=0, api_server_count=NUM_FRONT_ENDS))
    server.wait_until_ready()
    yield Front(server)
    server.stop()
    assert server.process.returncode == 0, server.output


async def read(client: httpx.AsyncClient, prompt: str, *, num_tokens: int = NUM_TOKENS) -> str:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    text = ""
    async with open_stream(client, "/v1/completions", body) as stream:
        async for event in stream.events():
            text += event["choices"][0]["text"]
    return text


async def read_from(front: Front, pid: int, prompt: str, *, num_tokens: int = NUM_TOKENS) -> str:
    """As `read`, over a connection of its own: one that has had a stream is closed."""
    async with front.client_of(pid) as client:
        return await read(client, prompt, num_tokens=num_tokens)


async def test_each_front_end_answers_with_the_same_tokens(front: Front) -> None:
    assert len(front.pids) == NUM_FRONT_ENDS
    texts = []
    for pid in front.pids:
        async with front.client_of(pid) as client:
            texts.append(await read(client, "hello"))
            assert (await client.get("/health")).status_code == 200

    assert len(texts[0]) == NUM_TOKENS
    assert texts == texts[:1] * NUM_FRONT_ENDS


async def test_connections_are_shared_out(front: Front) -> None:
    owners: list[int] = []

    async def connect() -> None:
        async with httpx.AsyncClient(base_url=front.server.url, timeout=60) as client:
            await client.get("/version")
            owners.append(front.owner(client))
            await wait_until(lambda: len(owners) == 40)  # all are open at the same time

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(connect)

    counts = [owners.count(pid) for pid in front.pids]
    assert min(counts) >= 10, counts


async def test_metrics_of_any_front_end_are_those_of_all_also_of_those_that_have_died(front: Front) -> None:
    async def counted(pid: int) -> float:
        async with front.client_of(pid) as client:
            return await front.server.metric(client, "vllm:generation_tokens_total")

    first, second = front.pids
    before = await counted(first)
    for pid in (first, second):
        await read_from(front, pid, "hello", num_tokens=10)
    assert [await counted(pid) for pid in (first, second)] == [before + 20] * 2

    kill(first)
    await wait_until(lambda: len(front.pids) == NUM_FRONT_ENDS and first not in front.pids)
    [new] = set(front.pids) - {second}
    await read_from(front, second, "hello", num_tokens=10)
    assert [await counted(pid) for pid in (second, new)] == [before + 30] * 2
    async with front.client_of(second) as client:
        text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)


async def test_a_front_end_that_is_killed_costs_only_its_own_streams_and_is_back(front: Front) -> None:
    first, second = front.pids
    texts: list[str] = []
    expected = await read_from(front, second, "safe")
    async with front.client_of(first) as doomed, front.client_of(second) as safe:

        async def read_doomed() -> None:
            with pytest.raises(httpx.HTTPError):
                await read(doomed, "doomed", num_tokens=3000)

        async def read_safe() -> None:
            texts.append(await read(safe, "safe"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_doomed)
            nursery.start_soon(read_safe)
            await wait_until(lambda: running(front, 2))
            kill(first)
            await wait_until(lambda: len(front.pids) == NUM_FRONT_ENDS and first not in front.pids)
            [new] = set(front.pids) - {second}
            async with front.client_of(new) as client:
                assert await read(client, "safe") == expected

        assert texts == [expected]
    async with front.client_of(second) as client:
        await wait_until(lambda: front.server.is_idle(client))


async def running(front: Front, count: int) -> bool:
    async with httpx.AsyncClient(base_url=front.server.url) as client:
        text = (await client.get("/metrics")).text
    values = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) == count


async def test_a_front_end_that_stands_still_loses_nothing_and_holds_up_no_other(front: Front) -> None:
    first, second = front.pids
    texts: dict[str, str] = {}
    expected = await read_from(front, second, "hello", num_tokens=200)
    async with front.client_of(first) as stopped, front.client_of(second) as other:

        async def read_into(client: httpx.AsyncClient, name: str) -> None:
            texts[name] = await read(client, name, num_tokens=200)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_into, stopped, "stopped")
            await wait_until(lambda: running(front, 1))
            os.kill(first, signal.SIGSTOP)
            try:
                with trio.fail_after(60):
                    await read_into(other, "other")  # more steps than the stopped one has credit for
            finally:
                os.kill(first, signal.SIGCONT)

    assert texts == {"stopped": expected, "other": expected}


async def test_control_calls_reach_all_front_ends_and_engines() -> None:
    FAKE_ENGINE_COUNT.append("control of several front ends")
    config = ServerConfig(port=0, api_server_count=NUM_FRONT_ENDS, dev_mode=True)
    server = Server.from_configs("control of several front ends", fake_engine(step_s=0.005, script=SCRIPT), config)
    server.wait_until_ready()
    front = Front(server)
    try:
        first, second = front.pids
        async with front.client_of(first) as one, front.client_of(second) as two:
            assert (await one.post("/sleep?level=1")).status_code == 200
            assert (await two.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await two.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 503
            engine = server.engine_pid
            kill(engine)
            await wait_until(lambda: server.engine_pids and server.engine_pids != [engine])
            assert (await one.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await two.post("/wake_up")).status_code == 200
            assert (await two.post("/sleep?level=7")).status_code == 400
            assert len(await read(one, "awake")) == NUM_TOKENS
    finally:
        server.stop()
    assert server.process.returncode == 0, server.output
    assert not [pid for pid in (first, second) if is_alive(pid)]


async def test_an_engine_that_is_gone_for_good_costs_no_token_at_any_front_end() -> None:
    purpose = "two engines, one of which is gone for good"
    FAKE_ENGINE_COUNT.append(purpose)
    engine = fake_engine(step_s=0.02, data_parallel_size=2, max_engine_restarts=0)
    server = Server.from_configs(purpose, engine, ServerConfig(port=0, api_server_count=NUM_FRONT_ENDS))
    server.wait_until_ready()
    front = Front(server)
    texts: dict[int, str] = {}

    async def read_into(number: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            texts[number] = await read(client, f"prompt {number % 4}")

    try:
        for number in range(4):
            await read_into(number)
        expected = dict(texts)
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(read_into, 4 + number)
            await wait_until(lambda: running(front, 16))
            kill(server.engine_pids[0])

        assert texts == {number: expected[number % 4] for number in range(20)}
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
        assert len(server.engine_pids) == 1

        kill(front.pids[0])
        await wait_until(lambda: server.output.count("answers clients") == NUM_FRONT_ENDS + 1)
        for pid in front.pids:
            assert await read_from(front, pid, "prompt 1") == expected[1]
        assert len(server.engine_pids) == 1
    finally:
        server.stop()
    assert server.process.returncode == 0, server.output


async def test_limits_of_admission_hold_for_all_front_ends_together() -> None:
    FAKE_ENGINE_COUNT.append("limits of several front ends")
    config = ServerConfig(port=0, api_server_count=NUM_FRONT_ENDS, drain_timeout_s=0.5)
    server = Server.from_configs("limits", fake_engine(step_s=0.05, script=SCRIPT, max_num_queued_reqs=2), config)
    server.wait_until_ready()
    front = Front(server)
    try:
        first, second = front.pids
        async with front.client_of(first) as one, front.client_of(second) as two, trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(read_quietly, server, first, front)
            await wait_until(lambda: running(front, 2))
            reply = await two.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 429, reply.text
            assert "2 requests are unfinished" in json.loads(reply.text)["error"]["message"]

            kill(first)  # what it had counts no more
            await wait_until(lambda: running(front, 0))
            reply = await two.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200, reply.text
            del one
        os.kill(second, signal.SIGSTOP)  # it cannot end, and the server does so all the same
    finally:
        server.stop()
    assert server.process.returncode == 0, server.output
    assert not is_alive(second)


async def read_quietly(server: Server, pid: int, front: Front) -> None:
    async with front.client_of(pid) as client:
        with suppress(httpx.HTTPError):  # its front end is killed
            await read(client, "long", num_tokens=2000)
