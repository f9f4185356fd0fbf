"""KVEventHub: passes on what enters and leaves the engines' prefix caches, to each subscriber all of it.

The output handlers put and never wait; a subscriber that does not keep up gets an error. Behind `llm.kv_events()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import trio

from trio_llm.errors import EngineDeadError, KVEventsLostError, fresh
from trio_llm.frontend.control.engine import Engine
from trio_llm.wire.messages import AllBlocksCleared, EngineCoreOutputs, KVEvent

__all__ = ["KVEventBatch", "KVEventBatches", "KVEventHub"]


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one message of an engine."""

    timestamp: float
    """The engine's monotonic clock, seconds. The batch of a restart has the time of the batch before it."""
    events: list[KVEvent]
    """In order; at least one. All subscribers share the list: do not change it."""
    engine_index: int = 0
    """Each engine has a cache of its own."""


class KVEventBatches:
    """What `llm.kv_events()` gives: an async iterator that only an error ends. Several tasks may read; each batch goes
    to one of them."""

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._send, self._receive = trio.open_memory_channel[KVEventBatch](max_unread)
        self._error: EngineDeadError | KVEventsLostError | None = None

    def __aiter__(self) -> KVEventBatches:
        return self

    async def __anext__(self) -> KVEventBatch:
        """The next batch.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            KVEventsLostError: this subscriber was too slow. All batches before the first lost one were taken.
            EngineDeadError: the engine is gone, and all batches it sent were taken.
            trio.ClosedResourceError: the block was left.
        """
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            assert self._error is not None
            raise fresh(self._error) from None

    def _put(self, batch: KVEventBatch) -> bool:
        """Add a batch. Returns False if there was no room for it: then the subscription is over."""
        try:
            self._send.send_nowait(batch)
        except trio.WouldBlock:
            self._end(
                KVEventsLostError(
                    f"{self._max_unread} batches of KV events were unread, the limit, when the next one came; "
                    "read faster or give a larger max_unread, then subscribe again and take the cache as unknown"
                )
            )
            return False
        return True

    def _end(self, error: EngineDeadError | KVEventsLostError) -> None:
        self._error = error
        self._send.close()

    def _close(self) -> None:
        self._send.close()
        self._receive.close()


class KVEventHub:
    """All subscribers of one front end. An `EngineListener`.

    Args:
        num_engines: the subscriptions end with the last of them.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self._subscribers: list[KVEventBatches] = []
        self._num_alive = num_engines
        self._dead_error: EngineDeadError | None = None
        self._last_s: dict[int, float] = {}
        """The clock of each engine in its newest batch."""

    def subscribe(self, max_unread: int) -> AbstractAsyncContextManager[KVEventBatches]:
        """A block that gets what is put while it lasts.

        Cancellation: safe; leaving the block, by any way, ends the subscription.

        Raises:
            ValueError: `max_unread` is below 1; at once.
            EngineDeadError: the engine is gone; on entering.
        """
        if max_unread < 1:
            raise ValueError(f"max_unread must be at least 1, not {max_unread}")
        return self._subscribed(max_unread)

    @asynccontextmanager
    async def _subscribed(self, max_unread: int) -> AsyncIterator[KVEventBatches]:
        await trio.lowlevel.checkpoint()
        if self._dead_error is not None:
            raise fresh(self._dead_error)
        batches = KVEventBatches(max_unread)
        self._subscribers.append(batches)
        try:
            yield batches
        finally:
            if batches in self._subscribers:
                self._subscribers.remove(batches)
            batches._close()

    def put(self, message: EngineCoreOutputs) -> None:
        """Pass on the events of a message that has some. Never blocks."""
        self._put(KVEventBatch(message.timestamp, message.kv_events, message.engine_index))

    def on_ready(self, engine: Engine) -> None:
        """Nothing: what a new incarnation stores, it sends."""

    def on_lost(self, engine: Engine, reason: str) -> None:
        """An engine is dead and another one is started, which has nothing in its cache."""
        self._put(KVEventBatch(self._last_s.get(engine.rank, 0.0), [AllBlocksCleared()], engine.rank))

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """An engine is gone. After the last one, each subscriber gets what it is owed, then the error."""
        self._num_alive -= 1
        if self._num_alive:
            self.on_lost(engine, str(error))
            return
        self._dead_error = error
        for batches in self._subscribers:
            batches._end(error)
        self._subscribers.clear()

    def _put(self, batch: KVEventBatch) -> None:
        self._last_s[batch.engine_index] = batch.timestamp
        self._subscribers = [batches for batches in self._subscribers if batches._put(batch)]
