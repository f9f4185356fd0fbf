"""KVEventLog: what enters and leaves the prefix cache, in order, until the step's message takes it along.

Pure. Written by the block pool and by SequenceBlocks; there is none unless the configuration asks for it.
"""

from __future__ import annotations

from trio_llm.engine.scheduling.block_hash import BlockHash
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["KVEventLog"]


class KVEventLog:
    """Events since the last `take`. True if there are any."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._removed: list[BlockHash] = []
        """After all of `_events`; one event when the next one comes."""

    def __bool__(self) -> bool:
        return bool(self._events or self._removed)

    def stored(
        self, block_hashes: list[BlockHash], *, parent: BlockHash | None, token_ids: list[int], block_size: int
    ) -> None:
        """Blocks that follow each other can be found from now on. As the fields of `BlockStored`."""
        self._end_removals()
        self._events.append(BlockStored(block_hashes, parent, token_ids, block_size))

    def removed(self, block_hash: BlockHash) -> None:
        """A block cannot be found any more."""
        self._removed.append(block_hash)

    def cleared(self) -> None:
        """No block can be found any more."""
        self._end_removals()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """All events since the last time, those that were removed one after the other as one."""
        self._end_removals()
        events, self._events = self._events, []
        return events

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed))
            self._removed = []
