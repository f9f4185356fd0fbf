"""`python -m benchmarks.soak`: open and leave thousands of requests, and see that nothing stays behind.

A third is left before its first token, a third in the middle, a third completes. After each round everything must be
where it was: tasks, file descriptors, KV blocks, gauges; resident memory after the last round is compared with that
after the one before. The engine is a fake one in a process of its own. Exit code 1 if anything is left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import trio

from trio_llm import AsyncLLM, EngineConfig, SamplingParams, open_llm
from trio_llm.config import FakeEngineConfig
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

MAX_GROWTH = 1.05
"""Of resident memory, from the last round but one to the last."""
IN_FLIGHT = 200
PROMPT = list(b"hello")


@dataclass(frozen=True, slots=True)
class State:
    """What must be as it was before."""

    tasks: int
    descriptors: int
    running: float
    waiting: float
    used_blocks: float


def main() -> None:
    """Measure, print a line a round, and exit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="in a round (default: 10000)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    options = parser.parse_args()
    sys.exit(trio.run(soak, options.requests, options.rounds))


async def soak(requests: int, rounds: int) -> int:
    config = EngineConfig(
        fake=FakeEngineConfig(logits_width=49_152, max_model_len=2000),
        num_gpu_blocks_override=4000,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
    )
    metrics = PrometheusStatLogger("fake")
    async with open_llm(config, stat_loggers=[metrics]) as llm:
        await run_round(llm, 300)
        before = await look(llm, metrics)
        memory: list[int] = []
        for number in range(1, rounds + 1):
            await run_round(llm, requests)
            after = await look(llm, metrics)
            memory.append(resident_bytes())
            print(json.dumps(line(number, requests, after, memory)), flush=True)
            if after != before:
                print(json.dumps({"case": "left behind", "before": str(before), "after": str(after)}), flush=True)
                return 1
    return 0 if len(memory) < 2 or memory[-1] <= memory[-2] * MAX_GROWTH else 1


def line(number: int, requests: int, state: State, memory: list[int]) -> dict[str, Any]:
    growth = round(memory[-1] / memory[-2], 4) if len(memory) > 1 else None
    return {
        "case": "round",
        "round": number,
        "requests": requests,
        "rss_mb": round(memory[-1] / 1e6, 1),
        "growth": growth,
        "tasks": state.tasks,
        "descriptors": state.descriptors,
        "running": state.running,
        "used_blocks": state.used_blocks,
    }


async def run_round(llm: AsyncLLM, requests: int) -> None:
    numbers = count()

    async def work() -> None:
        while (number := next(numbers)) < requests:
            await one_request(llm, number)

    async with trio.open_nursery() as nursery:
        for _ in range(IN_FLIGHT):
            nursery.start_soon(work)
    await llm.wait_idle()


async def one_request(llm: AsyncLLM, number: int) -> None:
    """By its number: with one choice or four, left at once, left in the middle, or read to its end."""
    params = SamplingParams(max_tokens=20, n=4 if number % 2 else 1)
    async with llm.generate(PROMPT, params) as stream:
        match number % 3:
            case 0:
                return
            case 1:
                await anext(stream)
                await anext(stream)
            case _:
                async for _ in stream:
                    pass


async def look(llm: AsyncLLM, metrics: PrometheusStatLogger) -> State:
    gc.collect()
    counts = await llm.check_scheduler()
    text = metrics.render()[0].decode()
    return State(
        tasks=trio.lowlevel.current_statistics().tasks_living,
        descriptors=len(os.listdir("/proc/self/fd")),
        running=gauge(text, "vllm:num_requests_running") + counts["num_running"],
        waiting=gauge(text, "vllm:num_requests_waiting") + counts["num_waiting"],
        used_blocks=gauge(text, "vllm:kv_cache_usage_perc") + counts["num_blocks"] - counts["num_free_blocks"],
    )


def gauge(text: str, name: str) -> float:
    return float(next(row for row in text.splitlines() if row.startswith(name)).rpartition(" ")[2])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
