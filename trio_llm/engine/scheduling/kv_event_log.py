"""KVEventLog: changes of the prefix cache, in order, until the message of a step takes them.

Pure. Written by BlockPool and SequenceBlocks. It exists only if the configuration asks for it.
"""

from __future__ import annotations

from trio_llm.engine.scheduling.block_hash import BlockHash
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["KVEventLog"]


class KVEventLog:
    """Events since the last `take`. Its truth value says whether there are any."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._removed: list[BlockHash] = []
        """Hashes removed after all of `_events`. They become one event when the next event comes."""

    def __bool__(self) -> bool:
        return bool(self._events or self._removed)

    def stored(
        self, block_hashes: list[BlockHash], *, parent: BlockHash | None, token_ids: list[int], block_size: int
    ) -> None:
        """Consecutive blocks can be found from now on. The arguments are the fields of `BlockStored`."""
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
        """Take all events. Consecutive removals are one event."""
        self._end_removals()
        events, self._events = self._events, []
        return events

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed))
            self._removed = []
