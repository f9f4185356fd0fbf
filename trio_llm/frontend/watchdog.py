"""Watchdog: stops a server whose engine is dead for good. Runs in the nursery of whoever serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from trio_llm.frontend.engine_client import EngineClient

__all__ = ["INTERVAL_S", "watch"]

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0
"""Between two looks: long enough for clients to be told, and for probes to see /health at 503."""


async def watch(client: EngineClient, stop_server: Callable[[], None], *, interval_s: float = INTERVAL_S) -> None:
    """Look every `interval_s`; once the engine is dead, stop the server, unless the client wants it kept alive.

    Returns after it stopped the server. Cancellation: safe.
    """
    while True:
        await trio.sleep(interval_s)
        if client.errored and not client.should_keep_api_server_alive:
            logger.error("the engine is dead, so the server stops: %s", client.dead_error)
            stop_server()
            return
