"""Recovery with real engine processes and a fake device: killers, stalls and lost frames."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.end_to_end.conftest import fake_engine, start_fake_server
from tests.end_to_end.servers import FAKE_ENGINE_COUNT, Server, is_alive, open_stream, wait_until
from tests.end_to_end.test_deaths import BOUND_S, REQUESTS, STALL_S, Readers, folder, open_engines, undisturbed
from trio_llm import SamplingParams
from trio_llm.errors import EngineGenerateError

__all__ = ["folder"]  # a fixture

SCRIPT = "abcdefghijklmnopqrstuvwxyz"
NUM_TOKENS = 150


async def test_a_request_that_kills_every_engine_ends_with_an_error_and_its_fifteen_neighbours_complete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    neighbours = [(f"neighbour {i}", SamplingParams(seed=i, max_tokens=30)) for i in range(15)]
    config = fake_engine(step_s=0.005, killer="!", stall_timeout_s=BOUND_S)
    with trio.fail_after(BOUND_S):
        async with (
            open_engines(config, "a request kills every engine") as (llm, incarnations),
            trio.open_nursery() as nursery,
        ):
            readers = Readers(llm, neighbours)
            for number in range(15):
                nursery.start_soon(readers.read, number)
            with pytest.raises(EngineGenerateError, match=r"engines die of this request: 3 did.*RuntimeError"):
                await llm.complete("! boom")

            assert await readers.wait() == await undisturbed(neighbours)
            assert len(incarnations) == 4
            assert (await llm.complete("after", max_tokens=3)).finished


async def test_a_frame_that_is_lost_on_its_way_costs_an_engine_and_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with trio.fail_after(BOUND_S):
        async with (
            open_engines(fake_engine(step_s=0.01), "a frame is lost") as (llm, incarnations),
            trio.open_nursery() as nursery,
        ):
            readers = Readers(llm, REQUESTS)
            for number in range(len(REQUESTS)):
                nursery.start_soon(readers.read, number)
            await wait_until(lambda: min(readers.num_outputs) >= 3)
            assert incarnations[0].pid is not None
            os.kill(incarnations[0].pid, signal.SIGUSR2)

            assert await readers.wait() == await undisturbed(REQUESTS)
            assert len(incarnations) == 2


async def read(client: httpx.AsyncClient, texts: list[str], has_begun: trio.Event) -> None:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": NUM_TOKENS, "temperature": 0}
    text = ""
    async with open_stream(client, "/v1/completions", body) as stream:
        async for event in stream.events():
            text += event["choices"][0]["text"]
            has_begun.set()
    texts.append(text)


async def test_an_engine_that_is_stopped_idle_or_under_load_is_told_by_health_and_service_comes_back_by_itself() -> (
    None
):
    engine = fake_engine(step_s=0.01, script=SCRIPT, stall_timeout_s=STALL_S)
    server = await trio.to_thread.run_sync(start_fake_server, "its engines are stopped", engine)
    try:
        async with server.client() as client:
            for num_streams in (0, 8):
                texts: list[str] = []
                async with trio.open_nursery() as nursery:
                    started = [trio.Event() for _ in range(num_streams)]
                    for event in started:
                        nursery.start_soon(read, client, texts, event)
                    for event in started:
                        await event.wait()
                    pid = server.engine_pid
                    os.kill(pid, signal.SIGSTOP)
                    FAKE_ENGINE_COUNT.append("another one after it was stopped")
                    with trio.fail_after(STALL_S):
                        await see_states(client, until="stalled")
                    with trio.fail_after(BOUND_S):
                        assert await see_states(client, until="recovering") in (
                            ["stalled", "recovering"],
                            ["recovering"],
                        )
                        await see_states(client, until="ready")
                    assert not is_alive(pid)
                assert texts == [(SCRIPT * NUM_TOKENS)[:NUM_TOKENS]] * num_streams
    finally:
        await trio.to_thread.run_sync(server.stop)
    assert server.process.returncode == 0


async def see_states(client: httpx.AsyncClient, *, until: str) -> list[str]:
    """What `/health` says, until it says that."""
    states: list[str] = []
    while not states or states[-1] != until:
        state = (await client.get("/health")).json()["status"]
        if not states or state != states[-1]:
            states.append(state)
        await trio.sleep(0.01)
    return states


async def bring_to(state: str, server: Server, client: httpx.AsyncClient) -> None:
    if state == "asleep":
        assert (await client.post("/sleep")).status_code == 200
    if state == "paused":
        assert (await client.post("/pause?mode=keep")).status_code == 200
    if state == "recovering":
        os.kill(server.engine_pid, signal.SIGKILL)
        FAKE_ENGINE_COUNT.append("another one, at a second signal")
    await wait_until(partial(is_in, "ready" if state == "paused" else state, client), within_s=BOUND_S)


async def is_in(state: str, client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/health")).json()["status"] == state)


@pytest.mark.parametrize("state", ["asleep", "paused", "recovering"])
async def test_a_second_signal_ends_a_drain_at_once_and_the_engine_with_it(state: str, folder: Path) -> None:
    start = partial(
        start_fake_server, "a second signal", fake_engine(), environment={"TMPDIR": str(folder)}, dev_mode=True
    )
    server = await trio.to_thread.run_sync(start)
    try:
        async with server.client() as client, trio.open_nursery() as nursery:
            has_begun = trio.Event()
            nursery.start_soon(read_until_it_breaks, client, has_begun)
            await has_begun.wait()
            await bring_to(state, server, client)
            server.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: "draining" in server.output)
            engines = server.engine_pids
            server.process.send_signal(signal.SIGTERM)

            assert await trio.to_thread.run_sync(server.wait_exit) == 1
        await wait_until(lambda: not any(is_alive(pid) for pid in engines), within_s=2)
        assert "ending at once" in server.output
    finally:
        await trio.to_thread.run_sync(server.stop)


async def read_until_it_breaks(client: httpx.AsyncClient, has_begun: trio.Event) -> None:
    with pytest.raises(httpx.TransportError):
        async with open_stream(client, "/v1/completions", {"prompt": "hello", "max_tokens": 50_000}) as stream:
            async for _ in stream.events():
                has_begun.set()
