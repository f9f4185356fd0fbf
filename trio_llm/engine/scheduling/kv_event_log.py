"""KVEventLog: changes of the prefix cache, in order, until they are sent. KVBacklog: those that one client has not got.

Pure. The log is written by BlockPool and SequenceBlocks; it exists only if the configuration asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trio_llm.engine.scheduling.block_hash import BlockHash
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["KVBacklog", "KVEventLog", "condense"]


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


class KVBacklog:
    """Events that wait for a client, bounded however long they do.

    Args:
        num_blocks: blocks that can be in the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_hashes = 4 * num_blocks  # twice what `condense` leaves at most, so that it is called rarely
        self._events: list[KVEvent] = []
        self._num_hashes = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: list[KVEvent]) -> None:
        """Append events. If too many wait, those that cancel each other are left out."""
        self._events += events
        self._num_hashes += _count_hashes(events)
        if self._num_hashes > self._max_hashes or len(self._events) > self._max_hashes:
            self._events = condense(self._events)
            self._num_hashes = _count_hashes(self._events)

    def take(self) -> list[KVEvent]:
        """Take all events."""
        events, self._events, self._num_hashes = self._events, [], 0
        return events


def condense(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Fewer events that lead to the same cache: those of blocks that came and went are left out.

    So a block may be stored whose parent is not among the events.

    Returns:
        At most one event that clears the cache, then at most one that removes blocks, then events that store some. The
        hashes are at most those that the cache had before and those that it has after.
    """
    is_cleared = False
    removed: dict[BlockHash, None] = {}
    stored: dict[BlockHash, BlockStored] = {}
    for event in events:
        match event:
            case AllBlocksCleared():
                is_cleared = True
                removed.clear()
                stored.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    if stored.pop(block_hash, None) is None:
                        removed[block_hash] = None
            case BlockStored():
                stored.update((one.block_hashes[0], one) for one in _split(event))
    condensed: list[KVEvent] = [AllBlocksCleared()] if is_cleared else []
    if removed:
        condensed.append(BlockRemoved(list(removed)))
    return condensed + list(stored.values())


def _split(event: BlockStored) -> Iterator[BlockStored]:
    """An event per block."""
    size = event.block_size
    parents = [event.parent_block_hash, *event.block_hashes]
    for i, block_hash in enumerate(event.block_hashes):
        yield BlockStored([block_hash], parents[i], event.token_ids[i * size : (i + 1) * size], size)


def _count_hashes(events: Iterable[KVEvent]) -> int:
    return sum(0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) for event in events)
