"""Real servers for tests: `trio-llm serve` as a process of its own, and the requests that tests send it.

Used by the fixtures in `conftest.py`. Every engine process that a test run starts is counted here, those that recovery
starts again, too.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio

from trio_llm.config import EngineConfig, ServerConfig

__all__ = ["ENGINE_COUNT", "FAKE_ENGINE_COUNT", "Server", "Stream", "is_alive", "wait_until", "wait_until_sync"]

BOUND_S = 120.0
"""No wait of a test is longer: something is wrong then."""

ENGINE_COUNT: list[str] = []
"""One entry for each engine process with torch that this test run started: what it was for."""

FAKE_ENGINE_COUNT: list[str] = []
"""The same for those with a fake device."""


async def wait_until(condition: Callable[[], Any], *, within_s: float = BOUND_S) -> None:
    """Look again and again until the condition holds; fail after `within_s`. The condition may be async."""
    with trio.fail_after(within_s):
        while True:
            result = condition()
            if hasattr(result, "__await__"):
                result = await result
            if result:
                return
            await trio.sleep(0.02)


def wait_until_sync(condition: Callable[[], bool], *, within_s: float = BOUND_S) -> None:
    """As `wait_until`, for fixtures that are not async."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        select.select([], [], [], 0.02)


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


class Stream:
    """An SSE answer, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._events = self._read()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events up to [DONE]; fails if the stream ends without."""
        async for event in self._events:
            yield event

    async def next(self) -> dict[str, Any]:
        return await anext(self._events)

    async def _read(self) -> AsyncIterator[dict[str, Any]]:
        async for line in self.response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended without [DONE]")


class Server:
    """A running server process.

    Args:
        purpose: what it is started for, for the count of engine processes.
        command: what to run; its output must tell the URL.
        environment: beside that of the tests.
    """

    def __init__(self, purpose: str, command: list[str], *, environment: Mapping[str, str] | None = None) -> None:
        # A file and not a pipe: nobody has to read it while the server writes.
        self._output = tempfile.NamedTemporaryFile(prefix="trio_llm-server-", suffix=".log")  # noqa: SIM115
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )

    @classmethod
    def from_command_line(cls, purpose: str, *options: str) -> Server:
        """`trio-llm serve` on a free port."""
        ENGINE_COUNT.append(purpose)
        command = [str(Path(sys.executable).with_name("trio-llm")), "serve", "--port", "0", *options]
        return cls(purpose, command)

    @classmethod
    def from_configs(
        cls,
        purpose: str,
        engine: EngineConfig,
        server: ServerConfig,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """The same server, with what has no flag: a fake engine."""
        FAKE_ENGINE_COUNT.append(purpose)
        configs = [msgspec.json.encode(config).decode() for config in (engine, server)]
        return cls(purpose, [sys.executable, "-m", "tests.end_to_end.fake_server", *configs], environment=environment)

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it listens; waits for the server to tell."""
        wait_until_sync(lambda: self._find_url() is not None or self.process.poll() is not None)
        url = self._find_url()
        assert url is not None, f"the server ended before it told its URL:\n{self.output}"
        return url

    def _find_url(self) -> str | None:
        found = re.search(r"http://[\d.]+:\d+", self.output)
        return found[0] if found else None

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.output}"
            try:
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until_sync(is_ready)

    @property
    def engine_pid(self) -> int:
        (pid,) = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """None while an engine is dead and the next one is not started yet."""
        return [child for child in children_of(self.process.pid) if is_engine(child)]

    def wait_exit(self) -> int:
        return self.process.wait(BOUND_S)

    def stop(self) -> None:
        """End it, by its own process id, whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        self._output.close()

    # ------------------------------------------------------------------------------------- requests

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Connections of one test."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=BOUND_S, limits=limits) as client:
            yield client

    async def metric(self, client: httpx.AsyncClient, name: str) -> float:
        """The value of a gauge or counter that has one series."""
        text = (await client.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return float(line.rpartition(" ")[2])

    async def is_idle(self, client: httpx.AsyncClient) -> bool:
        """Nothing runs, nothing waits, and every KV block is free."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all([await self.metric(client, name) == 0 for name in names])


@asynccontextmanager
async def open_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Stream]:
    """POST a body with `stream` and read the answer's events."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
        assert response.status_code == 200, response.text
        yield Stream(response)


def is_engine(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"trio_llm.engine" in command or b"tests.end_to_end.faulty_engine" in command


def kill(pid: int) -> None:
    """SIGKILL a process that this test run started."""
    os.kill(pid, signal.SIGKILL)
