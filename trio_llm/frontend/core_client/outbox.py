"""Outbox: frames on their way to an engine. Filled synchronously, emptied by the sender task."""

from __future__ import annotations

import trio

from trio_llm.wire.codec import encode
from trio_llm.wire.messages import Abort, ToEngine

__all__ = ["Outbox"]


class Outbox:
    """A queue that keeps the order, and merges aborts that follow each other into one message."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._aborted_ids: list[str] = []
        self._has_some = trio.Event()

    def append(self, message: ToEngine) -> None:
        """Queue a message. Synchronous: it works in a cancelled task too.

        Raises:
            CodecError: the message has no form on the wire. Nothing was queued.
        """
        # Aborts are encoded here, too, so that the caller gets the error.
        frame = encode(message)
        if isinstance(message, Abort):
            self._aborted_ids.extend(message.request_ids)
        else:
            self._flush_aborts()
            self._frames.append(frame)
        self._has_some.set()

    async def take(self) -> list[bytes]:
        """Take all frames, waiting for the first. For one task.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.
        """
        await self._has_some.wait()
        self._has_some = trio.Event()
        self._flush_aborts()
        frames, self._frames = self._frames, []
        return frames

    def clear(self) -> None:
        """Drop all frames: they were for an incarnation that is dead."""
        self._frames.clear()
        self._aborted_ids.clear()

    def _flush_aborts(self) -> None:
        if self._aborted_ids:
            self._frames.append(encode(Abort(self._aborted_ids)))
            self._aborted_ids = []
