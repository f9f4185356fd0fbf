"""A drain meets an engine that sleeps, is paused or is being started again: every pair ends properly, and in time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import trio

from trio_llm.config import ServerConfig
from trio_llm.frontend.http.serve import serve
from trio_llm.testing import FakeLLM, open_fake_llm

BOUND_S = 20
STATES: Final = ["ready", "asleep", "paused", "recovering"]
ANSWER: Final = "abcdefghij" * 10


@dataclass
class Draining:
    llm: FakeLLM
    client: httpx.AsyncClient
    stop: trio.Event
    has_stopped: trio.Event


@asynccontextmanager
async def open_server(drain_timeout_s: float) -> AsyncIterator[Draining]:
    """A server over a fake engine that is started again when it dies, and is stopped by `stop`."""
    config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s, served_model_names=("fake",))
    stop, has_stopped = trio.Event(), trio.Event()
    with trio.fail_after(BOUND_S):
        async with (
            open_fake_llm(answer=ANSWER, on_engine_death="restart", step_s=0.01) as llm,
            trio.open_nursery() as nursery,
        ):

            async def run(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(llm, config, stop=stop, task_status=task_status)
                has_stopped.set()

            (url,) = await nursery.start(run)
            async with httpx.AsyncClient(base_url=url, timeout=BOUND_S) as client:
                yield Draining(llm, client, stop, has_stopped)
            nursery.cancel_scope.cancel()


async def bring_to(state: str, llm: FakeLLM) -> None:
    match state:
        case "asleep":
            await llm.sleep(1)
        case "paused":
            await llm.pause_generation(mode="keep")
        case "recovering":
            llm.kill()
            await wait_for(llm, "recovering")


async def wait_for(llm: FakeLLM, state: str) -> None:
    while llm.status.state != state:  # noqa: ASYNC110 - there is no event for it
        await trio.sleep(0.001)


async def undo(state: str, llm: FakeLLM) -> None:
    match state:
        case "asleep":
            await llm.wake_up()
        case "paused":
            await llm.resume_generation()


@dataclass
class Answer:
    text: str = ""
    finish_reason: str | None = None
    is_done: bool = False
    """The end mark came, and nothing after it."""

    async def read(self, client: httpx.AsyncClient, has_begun: trio.Event) -> None:
        body: dict[str, Any] = {"prompt": "Hello", "stream": True, "max_tokens": 500}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                assert not self.is_done or not line
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.text += choice["text"]
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                    has_begun.set()


@pytest.mark.parametrize("state", STATES)
async def test_whatever_the_engine_is_doing_a_drain_refuses_new_work_and_ends_streams_after_its_timeout(
    state: str,
) -> None:
    async with open_server(1.0) as server, trio.open_nursery() as nursery:
        answer, has_begun = Answer(), trio.Event()
        nursery.start_soon(answer.read, server.client, has_begun)
        await has_begun.wait()
        await bring_to(state, server.llm)
        if state == "ready":
            server.llm.slow(BOUND_S)
        server.stop.set()
        await wait_for(server.llm, "draining")

        health = await server.client.get("/health")
        refused = [
            await server.client.post("/v1/completions", json={"prompt": "x"}),
            await server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}),
            await server.client.post("/v1/embeddings", json={"input": "x"}),
        ]
        await server.has_stopped.wait()

    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert [reply.status_code for reply in refused] == [503] * 3
    assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
    assert (answer.finish_reason, answer.is_done) == ("abort", True)
    assert ANSWER.startswith(answer.text)


@pytest.mark.parametrize("state", STATES)
async def test_what_can_go_on_within_the_timeout_is_completed(state: str) -> None:
    async with open_server(BOUND_S) as server, trio.open_nursery() as nursery:
        answer, has_begun = Answer(), trio.Event()
        nursery.start_soon(answer.read, server.client, has_begun)
        await has_begun.wait()
        await bring_to(state, server.llm)
        server.stop.set()
        await wait_for(server.llm, "draining")
        await undo(state, server.llm)

        await server.has_stopped.wait()
        await server.llm.assert_idle()

    assert (answer.text, answer.finish_reason, answer.is_done) == (ANSWER, "stop", True)


@pytest.mark.parametrize("state", STATES)
async def test_with_nothing_to_finish_a_server_stops_at_once_whatever_the_engine_is_doing(state: str) -> None:
    async with open_server(BOUND_S * 10) as server:
        await bring_to(state, server.llm)
        server.stop.set()

        await server.has_stopped.wait()


async def test_an_engine_that_dies_in_a_drain_is_started_again_for_what_is_unfinished() -> None:
    async with open_server(BOUND_S) as server, trio.open_nursery() as nursery:
        answer, has_begun = Answer(), trio.Event()
        nursery.start_soon(answer.read, server.client, has_begun)
        await has_begun.wait()
        server.stop.set()
        await wait_for(server.llm, "draining")
        server.llm.kill()

        await server.has_stopped.wait()

    assert (answer.text, answer.finish_reason, answer.is_done) == (ANSWER, "stop", True)
