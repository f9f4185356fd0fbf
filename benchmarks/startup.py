"""`python -m benchmarks.startup`: how long a person waits for the first sign of life.

Cases: `help` (the command `trio-llm --help`), `health` (from the command `trio-llm serve` to the first answer of
/health, which says "loading") and `ready` (to the first 200), all in seconds: least, median and most of several runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("trio-llm"))
POLL_S = 0.01


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time from the command to the first sign of life.")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (default: 5)")
    parser.add_argument("--model", help="a model directory; default: the embedded model, converted before")
    runs, model = (options := parser.parse_args()).runs, options.model
    report("help", [measure_help() for _ in range(runs)])
    health, ready = zip(*(measure_serve([model] if model else []) for _ in range(runs)), strict=True)
    report("health", list(health))
    report("ready", list(ready))


def report(case: str, seconds: list[float]) -> None:
    print(
        json.dumps(
            {
                "case": case,
                "runs": len(seconds),
                "least_s": round(min(seconds), 3),
                "median_s": round(statistics.median(seconds), 3),
                "most_s": round(max(seconds), 3),
            }
        ),
        flush=True,
    )


def measure_help() -> float:
    began = time.perf_counter()
    subprocess.run([COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure_serve(arguments: list[str]) -> tuple[float, float]:
    """Seconds to the first answer, and to readiness."""
    port = free_port()
    began = time.perf_counter()
    with running([COMMAND, "serve", *arguments, "--port", str(port)]) as process:
        return tuple(  # type: ignore[return-value]
            wait_for(process, port, began, is_enough)
            for is_enough in (lambda status: True, lambda status: status == 200)
        )


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_for(process: subprocess.Popen[bytes], port: int, began: float, is_enough: Callable[[int], bool]) -> float:
    while True:
        assert process.poll() is None, "the server ended; run it by hand to see why"
        status = health_status(port)
        if status is not None and is_enough(status):
            return time.perf_counter() - began
        time.sleep(POLL_S)


def health_status(port: int) -> int | None:
    """The status of /health; None if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
