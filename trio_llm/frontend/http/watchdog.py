"""Watchdog: stops a server whose engine is dead for good. Used by `serve`, in its nursery."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from trio_llm.frontend.engine_client import EngineClient

__all__ = ["GRACE_S", "watch"]

logger = logging.getLogger(__name__)

GRACE_S: Final = 5.0
"""Time between the engine's death and the server's end, in which clients get their errors and probes see a 503."""


async def watch(client: EngineClient, stop_server: Callable[[], None], *, grace_s: float = GRACE_S) -> None:
    """Once the engine is dead, wait `grace_s` seconds and stop the server, unless the client wants it kept alive.

    Cancellation: safe.
    """
    error = await client.wait_dead()
    if client.should_keep_api_server_alive:
        return
    await trio.sleep(grace_s)
    logger.error("the engine is dead, so the server stops: %s", error)
    stop_server()
