"""Processes that come and go: engines over real zmq sockets, with a fake model that is ready at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.end_to_end.conftest import start_fake_server
from tests.end_to_end.servers import (
    ENGINE_COUNT,
    FAKE_ENGINE_COUNT,
    is_alive,
    is_engine,
    kill,
    open_stream,
    wait_until,
    wait_until_sync,
)
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.workloads import WORKLOADS, generate_to_the_end
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.open_llm import open_llm
from trio_llm.testing.answers import LOGITS_WIDTH, MODEL_DIR

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 50_000}


def test_an_engine_goes_within_two_seconds_of_a_front_end_that_is_killed() -> None:
    server = start_fake_server("its front end is killed")
    engine_pid = server.engine_pid
    try:
        kill(server.process.pid)

        wait_until_sync(lambda: not is_alive(engine_pid), within_s=2)
    finally:
        server.stop()


async def test_sigterm_lets_streams_end_properly_and_then_everything_goes() -> None:
    server = start_fake_server("it is told to stop", drain_timeout_s=1.0)
    engine_pid = server.engine_pid
    try:
        async with server.client() as client:
            short_ends: list[Any] = []
            long_ends: list[Any] = []

            async def run(body: dict[str, Any], ends: list[Any], started: trio.Event) -> None:
                async with open_stream(client, "/v1/completions", body) as stream:
                    async for event in stream.events():
                        started.set()
                        ends.append(event["choices"][0]["finish_reason"])

            async with trio.open_nursery() as nursery:
                is_short_running, is_long_running = trio.Event(), trio.Event()
                nursery.start_soon(run, {**LONG, "max_tokens": 20}, short_ends, is_short_running)
                nursery.start_soon(run, LONG, long_ends, is_long_running)
                await is_short_running.wait()
                await is_long_running.wait()
                server.process.send_signal(signal.SIGTERM)
                await wait_until(lambda: "draining" in server.output)

            assert short_ends[-1] == "length"
            assert long_ends[-1] == "abort"
        assert await trio.to_thread.run_sync(server.wait_exit) == 0, server.output
        assert not is_alive(engine_pid)
        assert "Traceback" not in server.output
    finally:
        server.stop()


def run_command(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("trio-llm")), "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def assert_one_clear_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode not in (0, -signal.SIGKILL)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("trio-llm: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_too_little_memory_is_one_line_that_names_the_flags() -> None:
    ENGINE_COUNT.append("it has too little memory")

    result = run_command("--port", "0", "--kv-cache-memory", "16M", "--max-model-len", "8192")

    assert_one_clear_line(result, "--kv-cache-memory", "--max-model-len", "8192")


def test_a_port_in_use_is_one_line_that_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        result = run_command("--port", str(taken.getsockname()[1]))

    assert_one_clear_line(result, "--port")


def test_a_model_that_is_not_there_is_one_line_that_names_it() -> None:
    assert_one_clear_line(run_command("/nowhere/at/all"), "MODEL", "/nowhere/at/all")


async def assert_idle(llm: AsyncLLM) -> None:
    await llm.wait_idle()
    counts = await llm.check_scheduler()
    assert counts["num_running"] == counts["num_waiting"] == 0
    assert counts["num_free_blocks"] == counts["num_blocks"]


async def test_over_zmq_too_cancelling_at_every_checkpoint_leaves_nothing_behind() -> None:
    FAKE_ENGINE_COUNT.append("requests are cancelled over zmq")
    fake = FakeEngineConfig(model_dir=str(MODEL_DIR), logits_width=LOGITS_WIDTH, step_s=0.005)
    with trio.fail_after(120):
        async with open_llm(EngineConfig(fake=fake, num_gpu_blocks_override=200, max_num_queued_reqs=8)) as llm:
            for work, least in WORKLOADS.items():
                num_checkpoints = await cancel_at_every_checkpoint(partial(work, llm), partial(assert_idle, llm))
                assert num_checkpoints >= least, f"{work} was hardly interrupted anywhere"
            await generate_to_the_end(llm)
            await assert_idle(llm)
            await send_junk(llm)
            pid = llm._engines[0].core.current.pid  # type: ignore[attr-defined]
            folder = trio.Path(llm._engines[0].core.current._sockets.folder)  # type: ignore[attr-defined]
            assert is_alive(pid)
            assert not await folder.exists(), "a front end that is killed must not leave it behind"

    assert not is_alive(pid)


async def send_junk(llm: AsyncLLM) -> None:
    """Frames that are no messages, on the engine's input: dropped, and the engine goes on."""
    outbox = llm._engines[0].core.current._outbox  # type: ignore[attr-defined]
    for junk in (b"", b"\xc1", b"\x91" * 100_000, b"\x92\xa5abort\x05"):
        outbox._frames.append(junk)
    await llm.check_health()
    await generate_to_the_end(llm)


@pytest.fixture(autouse=True)
def _no_server_is_left() -> Any:
    before = running_engines()
    yield
    wait_until_sync(lambda: running_engines() <= before, within_s=10)


def running_engines() -> set[int]:
    """All engine processes of this machine."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid for pid in pids if is_engine(pid) and is_alive(pid)}
