"""`python -m benchmarks.frontend direct`: what the front end costs, with a fake engine in a process of its own.

The real wire, sockets, statistics and detokenizer of the embedded model; the engine gives every stream one token
a step. CPU time is that of this process alone, so the pace of the steps (`--step-s`) only has to be slow enough that
nearly every delivery carries one token: merging would make tokens cheap. `--beside COMMAND` runs a peer in turn with
ours; its last line of JSON must have `cpu_us_per_token`.

Cases, one JSON object a line:
    tokens    streams that generate: CPU per token, tokens per delivery, rate, memory
    lag       the same, while a prompt of 100,000 characters arrives: longest time between two turns of a waiting task
    idle      streams that wait for an engine that does nothing: memory each
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from trio_llm import AsyncLLM, EngineConfig, SamplingParams, open_llm
from trio_llm.config import FakeEngineConfig
from trio_llm.frontend.gc_tuning import tune_gc
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

LOGITS_WIDTH = 49_152
"""Of the embedded model."""
PROMPT = [5, 6, 7, 8]
LAG_PROMPT_CHARS = 100_000
TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    tokens: int
    step_s: float


@dataclass(slots=True)
class Count:
    tokens: int = 0
    deliveries: int = 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["direct", "idle"], help="idle: that case alone")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 2048], help="default: 64 256 2048")
    parser.add_argument("--tokens", type=int, default=200, help="tokens each stream generates (default: 200)")
    parser.add_argument(
        "--step-s", type=float, default=0.03, help="seconds a step of 256 streams takes (default: 0.03)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case, the median counts (default: 3)")
    parser.add_argument("--beside", help="command of a peer, run in turn with ours at 256 streams")
    options = parser.parse_args()
    if options.kind == "idle":
        report("idle", [trio.run(measure_idle, 4000)], [])
        return
    # In a process of its own: memory that was used before would serve again unseen.
    subprocess.run([sys.executable, "-m", "benchmarks.frontend", "idle"], check=True)
    for streams in options.streams:
        # More streams get slower steps: the same rate of tokens, so that deliveries are not merged.
        load = Load(
            streams, max(20, options.tokens * 256 // max(256, streams)), options.step_s * max(1.0, streams / 256)
        )
        peers = [run_peer(options.beside)] if options.beside and streams == 256 else []
        ours = [trio.run(measure_tokens, load)]
        for _ in range(options.rounds - 1):
            if peers:
                peers.append(run_peer(options.beside))
            ours.append(trio.run(measure_tokens, load))
        report("tokens", ours, peers)
    report("lag", [trio.run(measure_lag, Load(256, options.tokens, options.step_s))], [])


def report(case: str, ours: list[dict[str, Any]], peers: list[float]) -> None:
    """The round with the median cost, and the ratio of medians."""
    ours.sort(key=lambda result: result.get("cpu_us_per_token", 0.0))
    line = {"case": case, **ours[len(ours) // 2]}
    if peers:
        line["peer_cpu_us_per_token"] = round(statistics.median(peers), 2)
        line["ratio"] = round(line["cpu_us_per_token"] / statistics.median(peers), 3)
    print(json.dumps(line), flush=True)


def run_peer(command: str) -> float:
    """CPU microseconds a token of the peer."""
    output = subprocess.run(shlex.split(command), check=True, capture_output=True, text=True).stdout
    line = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    return float(json.loads(line)["cpu_us_per_token"])


def engine(step_s: float) -> EngineConfig:
    return EngineConfig(
        fake=FakeEngineConfig(logits_width=LOGITS_WIDTH, max_model_len=200_000, step_s=step_s),
        num_gpu_blocks_override=60_000,
        max_num_seqs=4096,
        max_num_batched_tokens=200_000,
    )


async def measure_tokens(load: Load) -> dict[str, Any]:
    async with open_llm(engine(load.step_s), stat_loggers=[PrometheusStatLogger("fake")]) as llm:
        tune_gc()  # as `trio-llm serve` does
        await run_load(llm, Load(8, 4, load.step_s), Count())
        count = Count()
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        await run_load(llm, load, count)
        cpu_s, wall_s = time.process_time() - cpu_began_s, time.perf_counter() - began_s
    gc.unfreeze()  # the next round starts as a new process would
    return {
        "streams": load.streams,
        "cpu_us_per_token": round(cpu_s / count.tokens * 1e6, 2),
        "tokens_per_delivery": round(count.tokens / count.deliveries, 3),
        "tokens_per_s": round(count.tokens / wall_s),
        "rss_mb": round(resident_bytes() / 1e6, 1),
    }


async def run_load(llm: AsyncLLM, load: Load, count: Count) -> None:
    params = SamplingParams(max_tokens=load.tokens, temperature=0, ignore_eos=True)

    async def run() -> None:
        async with llm.generate(PROMPT, params) as stream:
            async for output in stream:
                count.tokens += len(output.outputs[0].token_ids)
                count.deliveries += 1

    async with trio.open_nursery() as nursery:
        for _ in range(load.streams):
            nursery.start_soon(run)


async def measure_lag(load: Load) -> dict[str, Any]:
    async with open_llm(engine(load.step_s), stat_loggers=[PrometheusStatLogger("fake")]) as llm:
        gaps: list[float] = []

        async def tick() -> None:
            last_s = time.perf_counter()
            while True:
                await trio.sleep(TICK_S)
                now_s = time.perf_counter()
                gaps.append(now_s - last_s - TICK_S)
                last_s = now_s

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_load, llm, load, Count())
            await trio.sleep(load.step_s * 20)
            nursery.start_soon(tick)
            await trio.sleep(load.step_s * 20)
            without_s = max(gaps)
            gaps.clear()
            text = ("The quick brown fox jumps over the lazy dog. " * 3000)[:LAG_PROMPT_CHARS]
            async with llm.generate(text, SamplingParams(max_tokens=1)) as stream:
                async for _ in stream:
                    pass
            with_s = max(gaps)
            nursery.cancel_scope.cancel()
    return {
        "streams": load.streams,
        "lag_ms": round(with_s * 1e3, 1),
        "lag_without_prompt_ms": round(without_s * 1e3, 1),
    }


async def measure_idle(streams: int) -> dict[str, Any]:
    async with open_llm(engine(1.0)) as llm:
        params = SamplingParams(max_tokens=100)

        async def wait(is_open: trio.Event) -> None:
            async with llm.generate(PROMPT, params):
                is_open.set()
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await open_streams(nursery, wait, 100)
            before = resident_bytes()
            await open_streams(nursery, wait, streams)
            after = resident_bytes()
            nursery.cancel_scope.cancel()
    return {"streams": streams, "bytes_per_idle_stream": (after - before) // streams}


async def open_streams(nursery: trio.Nursery, wait: Any, count: int) -> None:
    events = [trio.Event() for _ in range(count)]
    for event in events:
        nursery.start_soon(wait, event)
    for event in events:
        await event.wait()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
