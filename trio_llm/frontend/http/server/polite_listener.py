"""PoliteListener: accepts from a socket that several processes share, so that each gets about as many connections.

The kernel wakes all of them for a connection, and one that is quick would take nearly all. Used by `serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from trio_llm.frontend.http.server.listeners import AcceptTurns

__all__ = ["PoliteListener"]

_YIELD_S: Final = 0.002
"""Time that the others get to accept first. One that stands still costs this much for each connection."""
_TRY_S: Final = 0.001
"""Time to accept a connection that was there a moment ago, and that another process may have taken since."""


class PoliteListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that gives way while this process has clearly more connections than another one.

    Args:
        count_open: returns the connections that this process has.
    """

    def __init__(self, listener: trio.SocketListener, turns: AcceptTurns, count_open: Callable[[], int]) -> None:
        self._listener = listener
        self._turns = turns
        self._count_open = count_open

    async def accept(self) -> trio.SocketStream:
        """As `trio.SocketListener.accept`. Cancellation: safe; no connection is lost."""
        while True:
            await trio.lowlevel.wait_readable(self._listener.socket)
            # All processes come here for each connection, so that what they see of each other is new.
            self._turns.publish(self._count_open())
            if self._turns.is_ahead(self._count_open()):
                await trio.sleep(_YIELD_S)
            with trio.move_on_after(_TRY_S):
                return await self._listener.accept()

    async def aclose(self) -> None:
        """Stop listening in this process."""
        await self._listener.aclose()
