"""open_test_server: a real HTTP server on loopback, in the test's own Trio loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.http.serve import serve
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

__all__ = ["open_test_server"]


@asynccontextmanager
async def open_test_server(
    llm: EngineClient, *, metrics: PrometheusStatLogger | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve `llm` on any free port of 127.0.0.1 while the block lasts; gives the URL, without a slash at the end.

    Real sockets and a MockClock with autojump do not go together: time would jump while bytes are on their way.

    Args:
        metrics: what /metrics shows; give the same one to `open_fake_llm(stat_loggers=[...])`.
        settings: fields of ServerConfig.

    Cancellation: leaving the block stops the server at once, without a drain; connections are closed.

    Raises:
        ConfigError: a setting is out of range.
        EngineDeadError: `llm` died, and the server has stopped therefore, five seconds later.
    """
    config = ServerConfig(**{"port": 0, "served_model_names": ("fake",), **settings})

    async def run(task_status: trio.TaskStatus[list[str]]) -> None:
        await serve(llm, config, metrics=metrics, task_status=task_status)

    with unwrap_single():
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(run)
            try:
                yield url
            finally:
                nursery.cancel_scope.cancel()
