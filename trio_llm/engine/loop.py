"""The engine's one loop: receive, answer, compute a step, send.

Shell around EngineCore: it does the waiting and the sending. Run by the engine process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from trio_llm.engine.core import EngineCore
from trio_llm.wire.messages import AttachClient, FromEngine, ToEngine

__all__ = ["Link", "run_loop"]


class Link(Protocol):
    """The engine's end of the wire, to all its clients. Client 0 is there from the beginning."""

    def receive(self, timeout_s: float) -> list[tuple[int, ToEngine]]:
        """The messages that have arrived, each with the index of its client. Those of client 0 come last: it says that
        another client is gone after that one has sent its last message."""
        ...

    def send(self, client_index: int, message: FromEngine) -> None: ...

    def attach(self, client: AttachClient) -> None:
        """Open the sockets of a client, in place of those that it has."""
        ...

    def detach(self, client_index: int) -> None:
        """Close the sockets of a client. What it has sent and was sent and is still on its way is dropped."""
        ...


def run_loop(core: EngineCore, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Serve until an exception ends it.

    What has arrived is handled, and answers that need no step are sent, before a step begins. So a ping waits for the
    step in flight and for no other.

    Heartbeats are sent here and nowhere else, so that they prove that the loop turns.

    Args:
        clock: that of the core.

    Raises:
        Exception: the executor failed as a whole.
    """
    while True:
        wait_s = 0.0 if core.is_busy else max(0.0, core.heartbeat_due_s - clock())
        for client_index, message in link.receive(wait_s):
            if problem := core.handle(message, client_index):
                print(f"dropped a message: {problem}", file=sys.stderr)
        for change in core.take_link_changes():
            if isinstance(change, AttachClient):
                link.attach(change)
            else:
                link.detach(change.client_index)
        for client_index, answer in core.take_answers():
            link.send(client_index, answer)
        for client_index, outputs in core.step():
            link.send(client_index, outputs)
        for client_index, heartbeat in core.take_heartbeats():
            link.send(client_index, heartbeat)
