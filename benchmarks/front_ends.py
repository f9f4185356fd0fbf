"""`python -m benchmarks.front_ends CASE …`: several front ends and engines as processes, under load and under faults.

Cases, one JSON object per line:
    events    SSE events per second in all, with 1 and with N front ends over a fake engine
    deaths    200 mixed requests over two engines; one front end is killed, then one engine for good: how many streams
              of living front ends were whole and had the text of an undisturbed run, and when the front end was back
    stopped   one front end is stopped for 20 s under load: rates of the others before and meanwhile, memory of the
              engines, and whether its streams were whole in the end

`--real` runs the embedded model in float32 in place of the fake device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from trio_llm.config import EngineConfig, FakeEngineConfig, ServerConfig

NUM_FRONT_ENDS: Final = 2
NUM_REQUESTS: Final = 200
LOGITS_WIDTH: Final = 49_152
"""Of the embedded model."""
STOPPED_S: Final = 20.0
RATE_S: Final = 5.0
START_S: Final = 180.0
_LETTERS: Final = tuple(b"abcdefghijklmnopqrstuvwxyz")


class Server:
    """A supervisor with its processes."""

    def __init__(self, engine: EngineConfig, *, num_front_ends: int) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="trio_llm-bench-", suffix=".log")  # noqa: SIM115
        server = ServerConfig(port=0, api_server_count=num_front_ends)
        configs = [msgspec.json.encode(config).decode() for config in (engine, server)]
        command = [sys.executable, "-m", "benchmarks.front_ends", "serve", *configs]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    async def wait_ready(self) -> None:
        with trio.fail_after(START_S):
            while not re.search(r"Ready after", self.output):
                if self.process.poll() is not None:
                    sys.exit(f"the server ended:\n{self.output}")
                await trio.sleep(0.05)

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def port(self) -> int:
        found = re.search(r"http://127.0.0.1:(\d+)", self.output)
        assert found is not None
        return int(found[1])

    def children(self, module: str) -> list[int]:
        """Process ids of the children that run this module."""
        pids = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, path.read_text().split()):
                with suppress(OSError):
                    if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        pids.append(pid)
        return pids

    @property
    def front_ends(self) -> list[int]:
        return self.children("trio_llm.supervisor.front_end")

    @property
    def engines(self) -> list[int]:
        return self.children("trio_llm.engine")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._log.close()


@contextmanager
def running(engine: EngineConfig, *, num_front_ends: int = NUM_FRONT_ENDS) -> Iterator[Server]:
    server = Server(engine, num_front_ends=num_front_ends)
    try:
        yield server
    finally:
        server.stop()


@dataclass(slots=True)
class Stream:
    """One streamed completion and what has come of it."""

    body: dict[str, Any]
    port: int = 0
    """Of this end of its connection."""
    front_end: int = 0
    """Process id; 0: not known."""
    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    num_events: int = 0
    is_whole: bool = False

    async def read(self, server: Server) -> None:
        """Read it to its end, or until its front end is gone."""
        with suppress(trio.BrokenResourceError, ConnectionError, OSError):
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                self.port = stream.socket.getsockname()[1]
                body = json.dumps({**self.body, "stream": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                await stream.send_all(head.encode() + body)
                rest = b""
                async for data in stream:
                    if not self.num_events and data.startswith(b"HTTP/1.1") and b" 200 " not in data[:16]:
                        raise RuntimeError(data.decode(errors="replace"))
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: ") and self._take(line.removeprefix(b"data: ").strip()):
                            return

    def _take(self, event: bytes) -> bool:
        """Take one event. Returns whether it was the last."""
        if event == b"[DONE]":
            self.is_whole = True
            return True
        self.num_events += 1
        for choice in json.loads(event).get("choices", ()):
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
        return False


def note_owners(server: Server, streams: list[Stream]) -> None:
    """Note which front end has accepted each stream's connection, of those that are open now."""
    owners: dict[str, int] = {}
    for pid in server.front_ends:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                owners[os.readlink(path)] = pid
    established = rf":{server.port:04X} \w+:(\w+) 01 (?:\S+\s+){{5}}(\d+)"
    inodes = {int(port, 16): inode for port, inode in re.findall(established, Path("/proc/net/tcp").read_text())}
    for stream in streams:
        stream.front_end = owners.get(f"socket:[{inodes.get(stream.port)}]", 0)


def make_engine(*, is_real: bool, step_s: float, num_engines: int, **more: Any) -> EngineConfig:
    if is_real:
        return EngineConfig(
            dtype="float32", data_parallel_size=num_engines, num_gpu_blocks_override=600, max_engine_restarts=0, **more
        )
    fake = FakeEngineConfig(logits_width=LOGITS_WIDTH, max_model_len=8192, step_s=step_s)
    return EngineConfig(
        fake=fake,
        data_parallel_size=num_engines,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=8192,
        max_engine_restarts=0,
        **more,
    )


def make_mixture(num_tokens: int) -> list[dict[str, Any]]:
    """Requests of many kinds, each with an answer that is the same each time."""
    return [
        {
            "prompt": f"Tell me something about the number {number % 50}. " * (1 + number % 7),
            "max_tokens": num_tokens // 2 + number % (num_tokens // 2),
            "temperature": 0 if number % 2 else 0.8,
            "seed": number,
            "n": 2 if number % 10 == 0 else 1,
            "ignore_eos": True,
        }
        for number in range(NUM_REQUESTS)
    ]


async def read_all(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    streams = [Stream(body) for body in bodies]
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.read, server)
    return streams


async def wait_for(condition: Callable[[], bool], *, within_s: float = START_S) -> float:
    """Seconds until the condition holds."""
    began_s = time.monotonic()
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - other processes make it so
            await trio.sleep(0.01)
    return time.monotonic() - began_s


async def measure_events(num_front_ends: int, *, streams: int, tokens: int) -> dict[str, Any]:
    engine = make_engine(is_real=False, step_s=0.001, num_engines=1)
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    with running(engine, num_front_ends=num_front_ends) as server:
        await server.wait_ready()
        began_s = time.monotonic()
        read = await read_all(server, [body] * streams)
        seconds = time.monotonic() - began_s
    return {
        "case": "events",
        "front_ends": num_front_ends,
        "streams": streams,
        "whole": sum(stream.is_whole for stream in read),
        "events_per_s": round(sum(stream.num_events for stream in read) / seconds),
        "tokens_per_s": round(streams * tokens / seconds),
    }


async def measure_deaths(*, is_real: bool) -> dict[str, Any]:
    bodies = make_mixture(40 if is_real else 200)
    with running(make_engine(is_real=is_real, step_s=0.02, num_engines=2)) as server:
        await server.wait_ready()
        expected = [stream.texts for stream in await read_all(server, bodies)]
        streams = [Stream(body) for body in bodies]
        back_s = 0.0
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.read, server)
            await wait_for(lambda: sum(stream.num_events > 0 for stream in streams) > NUM_REQUESTS // 4)
            note_owners(server, streams)
            victim = server.front_ends[0]
            os.kill(victim, signal.SIGKILL)
            back_s = await wait_for(lambda: server.output.count("answers clients") > NUM_FRONT_ENDS)
            os.kill(server.engines[0], signal.SIGKILL)
        alive = [(stream, texts) for stream, texts in zip(streams, expected, strict=True) if stream.front_end != victim]
        return {
            "case": "deaths",
            "device": "cpu" if is_real else "fake",
            "streams_of_living_front_ends": len(alive),
            "whole": sum(stream.is_whole for stream, _ in alive),
            "identical": sum(stream.texts == texts for stream, texts in alive),
            "broken_of_the_killed": sum(not stream.is_whole for stream in streams if stream.front_end == victim),
            "front_end_back_s": round(back_s, 2),
            "engines_left": len(server.engines),
        }


async def measure_stopped(*, is_real: bool) -> dict[str, Any]:
    tokens = 400 if is_real else 3000
    body = {"prompt": "Tell me a long story.", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    with running(make_engine(is_real=is_real, step_s=0.01, num_engines=2, credit_steps=64)) as server:
        await server.wait_ready()
        expected = (await read_all(server, [body]))[0].texts
        streams = [Stream(body) for _ in range(16 if is_real else 64)]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.read, server)
            await wait_for(lambda: all(stream.num_events > 5 for stream in streams))
            note_owners(server, streams)
            victim = server.front_ends[0]
            others = [stream for stream in streams if stream.front_end != victim]
            before = await rate_of(others)
            memory_mb = [rss_mb(pid) for pid in server.engines]
            os.kill(victim, signal.SIGSTOP)
            await trio.sleep(RATE_S)
            meanwhile = await rate_of(others)
            await trio.sleep(STOPPED_S - 2 * RATE_S)
            grown_mb = [rss_mb(pid) - first for pid, first in zip(server.engines, memory_mb, strict=True)]
            os.kill(victim, signal.SIGCONT)
        return {
            "case": "stopped",
            "device": "cpu" if is_real else "fake",
            "streams": len(streams),
            "of_others": len(others),
            "rate_before": round(before),
            "rate_meanwhile": round(meanwhile),
            "ratio": round(meanwhile / before, 3) if before else None,
            "engines_grown_mb": grown_mb,
            "whole": sum(stream.is_whole for stream in streams),
            "identical": sum(stream.texts == expected for stream in streams),
        }


async def rate_of(streams: list[Stream]) -> float:
    """Events per second of these streams, over `RATE_S`."""
    before = sum(stream.num_events for stream in streams)
    await trio.sleep(RATE_S)
    return (sum(stream.num_events for stream in streams) - before) / RATE_S


def rss_mb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=["events", "deaths", "stopped"])
    parser.add_argument("--real", action="store_true", help="the embedded model in float32, where the case permits it")
    parser.add_argument("--streams", type=int, default=64, help="for `events` (default: 64)")
    parser.add_argument("--tokens", type=int, default=300, help="for `events`, of each stream (default: 300)")
    args = parser.parse_args()
    for case in args.cases:
        if case == "events":
            for count in (1, NUM_FRONT_ENDS):
                report(trio.run(partial(measure_events, count, streams=args.streams, tokens=args.tokens)))
        elif case == "deaths":
            report(trio.run(partial(measure_deaths, is_real=args.real)))
        else:
            report(trio.run(partial(measure_stopped, is_real=args.real)))
    return 0


def report(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def serve(engine_json: str, server_json: str) -> int:
    """The server of these cases, with configurations given as JSON: a fake engine has no flags."""
    from trio_llm.cli.serve import run_server

    engine = msgspec.json.decode(engine_json, type=EngineConfig)
    server = msgspec.json.decode(server_json, type=ServerConfig)
    return run_server(engine, server, log_level="info")


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main())
