"""Each death of the matrix, with real processes: engines and front ends that end in every way, at every moment."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

from tests.end_to_end.conftest import fake_engine, start_fake_server
from tests.end_to_end.death_matrix import (
    ENGINE,
    FAULTS,
    FRONT_END,
    MOMENTS,
    REASONS,
    EngineFate,
    Fault,
    FrontEndFate,
    Moment,
)
from tests.end_to_end.faulty_engine import FAULTY_ENGINE
from tests.end_to_end.servers import FAKE_ENGINE_COUNT, Server, is_alive, open_stream, wait_until
from tests.frontend.test_recovery import whole
from trio_llm import SamplingParams
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.engine.executor.fake import load_fake
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.core_client.one_engine import OneEngineClient
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.frontend.core_client.restarting import RestartingClient
from trio_llm.frontend.http.serve import serve
from trio_llm.frontend.open_llm import open_llm_over
from trio_llm.testing.answers import MODEL_DIR
from trio_llm.testing.in_memory import InMemoryCoreClient

BOUND_S = 60.0
STALL_S = 3.0
"""An idle engine says something every second."""

Answer = dict[int, tuple[list[int], str, int, str | None]]

SHORT: Final = "hello"
LONG: Final = "hello, " * 200
"""Takes many steps until its first token."""
REQUESTS: Final = [
    (SHORT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
    (SHORT, SamplingParams(seed=1, max_tokens=60, logprobs=2)),
    (SHORT, SamplingParams(seed=2, max_tokens=60, n=2)),
    (SHORT, SamplingParams(seed=3, max_tokens=60, stop=("ab",))),
]
LONG_REQUESTS: Final = [(LONG, params) for _, params in REQUESTS]

ENGINE_SIGNALS: Final[dict[Fault, signal.Signals]] = {
    "SIGKILL": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "exception": signal.SIGUSR1,
    "exit 0": signal.SIGTERM,
}
FRONT_END_SIGNALS: Final = {**ENGINE_SIGNALS, "exit 0": signal.SIGUSR2}


class AtOnce(RestartPolicy):
    """No back-off: its times are tested under a mock clock."""

    def next_delay_s(self, now_s: float) -> float | None:
        return None if super().next_delay_s(now_s) is None else 0.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets of the test; nothing must be left in it. With a short path: an ipc address has about 100 bytes."""
    path = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield path
    left = list(path.iterdir())
    shutil.rmtree(path)
    assert left == []


@asynccontextmanager
async def open_engines(
    config: EngineConfig, purpose: str = "the death matrix, an engine dies"
) -> AsyncIterator[tuple[AsyncLLM, list[OneEngineClient]]]:
    """Real engine processes, one after the other, and a front end that starts another one at once.

    Gives the clients of all incarnations, too.
    """
    incarnations: list[OneEngineClient] = []

    def make(epoch: int) -> OneEngineClient:
        FAKE_ENGINE_COUNT.append(purpose)
        incarnations.append(OneEngineClient(config, epoch, command=FAULTY_ENGINE))
        return incarnations[-1]

    async with open_llm_over(RestartingClient(make, AtOnce(100)), config) as llm:
        yield llm, incarnations
    assert not any(is_alive(pid) for pid in pids_of(incarnations))


def pids_of(incarnations: list[OneEngineClient]) -> list[int]:
    return [one.pid for one in incarnations if one.pid is not None]


async def undisturbed(requests: list[tuple[str, SamplingParams]]) -> list[Answer]:
    """The answers of an engine that nothing happens to."""
    config = fake_engine()
    executor = load_fake(config, lambda *_: None, model_dir=str(MODEL_DIR))
    async with open_llm_over(InMemoryCoreClient(executor, config), config) as llm:
        return [whole([output async for output in stream]) for stream in await all_streams(llm, requests)]


async def all_streams(llm: AsyncLLM, requests: list[tuple[str, SamplingParams]]) -> list[Any]:
    return [await llm.generate(*request).__aenter__() for request in requests]


class Readers:
    """All requests of a cell, read at the same time."""

    def __init__(self, llm: AsyncLLM, requests: list[tuple[str, SamplingParams]]) -> None:
        self.llm = llm
        self.requests = requests
        self.num_outputs = [0] * len(requests)
        self.answers: dict[int, Answer] = {}

    async def read(self, number: int) -> None:
        outputs = []
        async with self.llm.generate(*self.requests[number]) as stream:
            async for output in stream:
                outputs.append(output)
                self.num_outputs[number] += 1
        self.answers[number] = whole(outputs)

    async def wait(self) -> list[Answer]:
        await wait_until(lambda: len(self.answers) == len(self.requests))
        return [self.answers[number] for number in range(len(self.requests))]


# ------------------------------------------------------------------------------- the engine dies


async def kill_engine(fault: Fault, moment: Moment) -> tuple[EngineFate, str]:
    """Bring an engine to the moment, let the fault happen, and see what becomes of everybody. Also the reason told."""
    config = fake_engine(
        step_s=0.01,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        stall_timeout_s=STALL_S if fault == "SIGSTOP" else BOUND_S,
    )
    requests = {"idle": [], "prefill": LONG_REQUESTS}.get(moment, REQUESTS)
    with trio.fail_after(BOUND_S):
        async with open_engines(config) as (llm, incarnations), trio.open_nursery() as nursery:
            readers = Readers(llm, requests)
            for number in range(len(requests)):
                nursery.start_soon(readers.read, number)
            has_stopped = await bring_to(llm, moment, readers, nursery)
            states, reasons = await see_it_die(llm, pids_of(incarnations)[0], ENGINE_SIGNALS[fault])
            outcome = await see_requests(llm, moment, readers)
            if has_stopped is not None:
                await has_stopped.wait()
                outcome += "; then exit code 0"
            elif moment == "idle":
                assert (await llm.complete(SHORT, max_tokens=3)).finished
            counts = await llm.check_scheduler()
            assert counts["num_free_blocks"] == counts["num_blocks"], counts
            assert len(incarnations) == 2
            nursery.cancel_scope.cancel()
    (reason,) = set(reasons)
    return EngineFate(states, outcome), reason


async def bring_to(llm: AsyncLLM, moment: Moment, readers: Readers, nursery: trio.Nursery) -> trio.Event | None:
    """Returns an event for the end of the server, if there is one."""
    if moment == "prefill":
        await wait_until(partial(has_running, llm))
        assert not any(readers.num_outputs)
    elif moment != "idle":
        await wait_until(lambda: min(readers.num_outputs) >= 3)
    if moment == "asleep":
        await llm.sleep(1)
    if moment == "paused":
        await llm.pause_generation(mode="keep")
    if moment != "draining":
        return None
    stop, has_stopped = trio.Event(), trio.Event()

    async def run() -> None:
        await serve(llm, ServerConfig(port=0, drain_timeout_s=BOUND_S), stop=stop)
        has_stopped.set()

    nursery.start_soon(run)
    stop.set()
    await wait_until(lambda: llm.status.state == "draining")
    return has_stopped


async def has_running(llm: AsyncLLM) -> bool:
    return (await llm.check_scheduler())["num_running"] > 0


async def see_it_die(llm: AsyncLLM, pid: int, number: signal.Signals) -> tuple[tuple[str, ...], list[str]]:
    """Returns the states from then on until there is another engine, and the reasons told."""
    seen, reasons = [llm.status.state], []
    os.kill(pid, number)
    while llm.statistics().num_restarts == 0:
        lost_reason = llm._engines[0].monitor.lost_reason
        if lost_reason is not None and lost_reason not in reasons:
            reasons.append(lost_reason)
        if llm.status.state != seen[-1]:
            seen.append(llm.status.state)
        await trio.sleep(0.002)
    await llm.check_health()
    if llm.status.state != seen[-1]:
        seen.append(llm.status.state)
    return tuple(seen[1:] or seen), reasons


async def see_requests(llm: AsyncLLM, moment: Moment, readers: Readers) -> str:
    when = ""
    if moment == "asleep":
        assert await llm.is_sleeping()
        await llm.wake_up()
        when = " when it is woken up"
    if moment == "paused":
        assert await llm.is_paused()
        assert not readers.answers
        await llm.resume_generation()
        when = " when it is resumed"
    if not readers.requests:
        return "there are none"
    assert await readers.wait() == await undisturbed(readers.requests), "tokens were lost, repeated or changed"
    return f"go on{when}"


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_that_dies_is_followed_by_another_which_goes_on(
    fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    num_descriptors = len(os.listdir("/proc/self/fd"))
    fates: dict[tuple[Fault, Moment], EngineFate] = {}
    reasons: dict[Moment, str] = {}

    async def run(moment: Moment) -> None:
        fates[fault, moment], reasons[moment] = await kill_engine(fault, moment)

    await at_once(run)

    assert fates == {key: fate for key, fate in ENGINE.items() if key[0] == fault}
    assert [reason for reason in reasons.values() if not reason.startswith(REASONS[fault])] == []
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


async def at_once(run: Callable[[Moment], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for moment in MOMENTS:
            nursery.start_soon(run, moment)


# ---------------------------------------------------------------------------- the front end dies

NUM_TOKENS: Final = 150
SCRIPT: Final = "abcdefghijklmnopqrstuvwxyz"


async def kill_front_end(fault: Fault, moment: Moment, folder: Path) -> FrontEndFate:
    """Bring a server to the moment, let the fault happen, and see what becomes of everybody."""
    engine = fake_engine(
        step_s=0.01,
        script=SCRIPT,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        credit_steps=16,
        stall_timeout_s=STALL_S,
    )
    start = partial(
        start_fake_server,
        "the death matrix, a front end dies",
        engine,
        environment={"TMPDIR": str(folder)},
        dev_mode=True,
    )
    server = await trio.to_thread.run_sync(start)
    try:
        with trio.fail_after(BOUND_S):
            async with server.client() as client, trio.open_nursery() as nursery:
                answer = HttpAnswer()
                if moment != "idle":
                    nursery.start_soon(answer.read, client, LONG if moment == "prefill" else SHORT)
                await bring_server_to(server, client, moment, answer)
                engine_pid = server.engine_pid
                server.process.send_signal(FRONT_END_SIGNALS[fault])
                if fault == "SIGSTOP":
                    stopped_s = time.monotonic()
                    await wait_until(lambda: time.monotonic() - stopped_s > 1.5 * STALL_S)
                    server.process.send_signal(signal.SIGCONT)
                    exit_ = await see_it_go_on(server, client, moment, answer)
                    assert server.process.poll() is not None or server.engine_pid == engine_pid
                else:
                    exit_ = await see_exit(server)
                    await wait_until(lambda: not is_alive(engine_pid), within_s=2)
                if moment != "idle":
                    await answer.over.wait()
    finally:
        await trio.to_thread.run_sync(server.stop)
    assert not is_alive(engine_pid)
    return FrontEndFate(exit_, answer.outcome)


class HttpAnswer:
    """A streamed answer as its client sees it."""

    def __init__(self) -> None:
        self.text = ""
        self.outcome = "there are none"
        self.over = trio.Event()

    async def read(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        try:
            async with open_stream(client, "/v1/completions", body) as stream:
                async for event in stream.events():
                    self.text += event["choices"][0]["text"]
            is_whole = self.text == (SCRIPT * NUM_TOKENS)[:NUM_TOKENS]
            self.outcome = "the whole answer" if is_whole else f"another answer: {self.text}"
        except httpx.TransportError:
            self.outcome = "a connection that breaks off"
        self.over.set()


async def bring_server_to(server: Server, client: httpx.AsyncClient, moment: Moment, answer: HttpAnswer) -> None:
    if moment == "prefill":
        await wait_until(partial(has_running_request, client))
        assert not answer.text
    elif moment != "idle":
        await wait_until(lambda: len(answer.text) >= 3)
    if moment == "asleep":
        assert (await client.post("/sleep")).status_code == 200
    if moment == "paused":
        assert (await client.post("/pause?mode=keep")).status_code == 200
    if moment == "draining":
        server.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "draining" in server.output)


async def has_running_request(client: httpx.AsyncClient) -> bool:
    """By the scheduler: gauges come with the first token."""
    response = await client.post("/collective_rpc", json={"method": "check_scheduler"})
    return bool(response.json()["results"][0]["num_running"] == 1)


async def see_exit(server: Server) -> str:
    code = await trio.to_thread.run_sync(server.wait_exit)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


async def see_it_go_on(server: Server, client: httpx.AsyncClient, moment: Moment, answer: HttpAnswer) -> str:
    if moment == "draining":
        return f"{await see_exit(server)}, after SIGCONT and the drain"
    when = ""
    if moment == "asleep":
        await wait_until(partial(is_told, client, "/is_sleeping"))
        assert (await client.post("/wake_up")).status_code == 200
        when = " when it is woken up"
    if moment == "paused":
        await wait_until(partial(is_told, client, "/is_paused"))
        assert (await client.post("/resume")).status_code == 200
        when = " when it is resumed"
    if moment != "idle":
        await answer.over.wait()
        answer.outcome += when
    await wait_until(partial(is_healthy, client))
    assert "is started again" not in server.output, f"the engine has done nothing wrong: {server.output}"
    return "none: it goes on after SIGCONT"


async def is_told(client: httpx.AsyncClient, path: str) -> bool:
    return True in (await client.get(path)).json().values()


async def is_healthy(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_front_end_that_dies_takes_its_engine_with_it_and_one_that_is_stopped_goes_on(
    fault: Fault, folder: Path
) -> None:
    fates: dict[tuple[Fault, Moment], FrontEndFate] = {}

    async def run(moment: Moment) -> None:
        fates[fault, moment] = await kill_front_end(fault, moment, folder)

    await at_once(run)

    assert fates == {key: fate for key, fate in FRONT_END.items() if key[0] == fault}
