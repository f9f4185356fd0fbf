"""`python -m tests.end_to_end.fake_server ENGINE SERVER`: `trio-llm serve` with configurations given as JSON.

SIGUSR1 makes a task beside the server raise what nobody expects; at SIGUSR2 the process exits as if all were well,
without a word to anybody.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec
import trio

from trio_llm.cli import serve
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import TrioLLMError

serve_engine = serve.serve_engine


async def serve_with_faults(*args: Any, **options: Any) -> None:
    """`serve_engine` in a nursery with a task that fails when it is told to."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_when_told)
        await serve_engine(*args, **options)
        nursery.cancel_scope.cancel()


async def fail_when_told() -> None:
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        async for _ in signals:
            raise RuntimeError("a bug")


if __name__ == "__main__":
    engine_json, server_json = sys.argv[1:]
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    serve.serve_engine = serve_with_faults
    try:
        code = serve.run_server(
            msgspec.json.decode(engine_json, type=EngineConfig),
            msgspec.json.decode(server_json, type=ServerConfig),
            log_level="info",
        )
    except TrioLLMError as error:
        print(f"trio-llm: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
