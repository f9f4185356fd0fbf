"""The engine's one loop: receive, answer, compute a step, send.

Shell around EngineCore: it does the waiting and the sending. Run by the engine process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from trio_llm.engine.core import EngineCore
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["HEARTBEAT_INTERVAL_S", "Link", "run_loop"]

HEARTBEAT_INTERVAL_S = 1.0


class Link(Protocol):
    """The engine's end of the wire."""

    def receive(self, timeout_s: float) -> list[ToEngine]: ...
    def send(self, message: FromEngine) -> None: ...


def run_loop(core: EngineCore, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Serve until an exception ends it.

    What has arrived is handled, and answers that need no step are sent, before a step begins. So a ping waits for the
    step in flight and for no other.

    Heartbeats are sent here and nowhere else, so that they prove that the loop turns.

    Raises:
        Exception: the executor failed as a whole.
    """
    last_sent_s = clock()
    while True:
        wait_s = 0.0 if core.is_busy else max(0.0, last_sent_s + HEARTBEAT_INTERVAL_S - clock())
        for message in link.receive(wait_s):
            core.handle(message)
        for answer in core.take_answers():
            link.send(answer)
            last_sent_s = clock()
        outputs = core.step()
        if outputs is not None:
            link.send(outputs)
            last_sent_s = clock()
        elif clock() - last_sent_s >= HEARTBEAT_INTERVAL_S:
            link.send(core.heartbeat())
            last_sent_s = clock()
