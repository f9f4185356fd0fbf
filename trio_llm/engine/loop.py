"""The engine's one loop: receive, plan, execute, commit, send.

Shell around EngineCore: it owns the clock and the waiting. Run by the engine process.
"""

from __future__ import annotations

import time
from typing import Protocol

from trio_llm.engine.core import EngineCore
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["HEARTBEAT_INTERVAL_S", "Link", "run_loop"]

HEARTBEAT_INTERVAL_S = 1.0


class Link(Protocol):
    """The engine's end of the wire."""

    def receive(self, timeout_s: float) -> list[ToEngine]: ...
    def send(self, message: FromEngine) -> None: ...


def run_loop(core: EngineCore, link: Link) -> None:
    """Serve until an exception ends it.

    The heartbeat comes from here and from nowhere else, so that it proves that the loop turns.

    Raises:
        Exception: the executor failed as a whole.
    """
    last_sent_s = time.monotonic()
    while True:
        wait_s = 0.0 if core.is_busy else max(0.0, last_sent_s + HEARTBEAT_INTERVAL_S - time.monotonic())
        for message in link.receive(wait_s):
            core.handle(message, time.monotonic())
        outputs = core.step(time.monotonic())
        if outputs is not None:
            link.send(outputs)
            last_sent_s = time.monotonic()
        elif time.monotonic() - last_sent_s >= HEARTBEAT_INTERVAL_S:
            link.send(core.heartbeat())
            last_sent_s = time.monotonic()
