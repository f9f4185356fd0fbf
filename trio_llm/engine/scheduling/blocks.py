"""BlockPool: which KV blocks are held, and which can be found again by what they hold.

Pure. Owned by SequenceBlocks, which alone allocates and releases blocks.

    free ── allocate ──> held ── release, without a hash ──> free
      ^                   ^ └─── release, with a hash ────> cached ── evict, for allocate ──> held
      └─ forget ──────────┼──────────────────────────────────┘
                          └── share ─────────────────────────┘
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from trio_llm.engine.scheduling.block_hash import BlockHash
from trio_llm.engine.scheduling.kv_event_log import KVEventLog

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to num_blocks - 1. Each is *held* by one or more sequences, or *cached*: not held, but still known by
    its hash, or *free*. Cached blocks count as free: they are allocated when no others are left, the least recently
    released first.

    Args:
        keeps_cache: False: blocks are never known by their hash.
        log: gets the hashes that are no longer known. The caller of `publish` logs new ones, since it has the tokens.
    """

    def __init__(self, num_blocks: int, *, keeps_cache: bool = True, log: KVEventLog | None = None) -> None:
        self._keeps_cache = keeps_cache
        self._log = log
        self._free = list(range(num_blocks - 1, -1, -1))
        """A stack: the block that was freed last is the likeliest to be in a processor's cache still."""
        self._num_holders = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Not held and with a hash; the next to be evicted first."""
        self._by_hash: dict[BlockHash, int] = {}
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        """Indexed by block. Of two blocks with equal content, only one is known by their hash; the other has None."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that are not held and can be found by their hash."""
        return len(self._cached)

    def num_holders(self, block_id: int) -> int:
        """Sequences that hold the block."""
        return self._num_holders[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks that are not held. None, and nothing is taken, if fewer are free."""
        if count > self.num_free:
            return None
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Let one more sequence hold these blocks, which are held or cached."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                del self._cached[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Let one sequence less hold these blocks. Each must be held: releasing twice is a bug of ours."""
        # From the end: fewer requests can share the tail of a sequence than its beginning, so it is evicted first.
        for block_id in reversed(block_ids):
            assert self._num_holders[block_id] > 0, f"block {block_id} is released but not held"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] > 0:
                continue
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    # ---------------------------------------------------------------------------------------- hashes

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest known beginning of `hashes`. Nothing is taken: see `share`."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """Let a held block be found, which is full and never written again. No effect if its hash is known.

        Returns:
            True if the hash was not known before and is from now on.
        """
        assert self._num_holders[block_id] > 0, f"block {block_id} is published but not held"
        assert self._hashes[block_id] is None, f"block {block_id} is published twice"
        if not self._keeps_cache or block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let these blocks be found no more. Sequences that hold them keep them."""
        for block_id in block_ids:
            if self._hashes[block_id] is not None:
                self._forget_one(block_id)
                if self._num_holders[block_id] == 0:
                    del self._cached[block_id]
                    self._free.append(block_id)

    def forget_all(self) -> None:
        """Let no block be found any more. Sequences keep what they hold."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
        self._by_hash.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        if self._log is not None:
            self._log.cleared()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._forget_one(block_id)
        return block_id

    def _forget_one(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block_id] = None
        if self._log is not None:
            self._log.removed(block_hash)

    # ----------------------------------------------------------------------------------- observation

    def check(self, held: Iterable[int]) -> None:
        """Assert that no block is lost, doubled or known by a wrong hash.

        Args:
            held: the blocks of all holders; a block that several sequences hold comes several times.
        """
        holders = Counter(held)
        counted = {block_id: count for block_id, count in enumerate(self._num_holders) if count}
        assert counted == dict(holders), f"held {dict(holders)}, but counted {counted}"
        everything = sorted([*self._free, *self._cached, *holders])
        assert everything == list(range(len(self._num_holders))), "a block is lost or doubled"
        assert all(self._hashes[block_id] is None for block_id in self._free), "a free block has a hash"
        assert all(self._hashes[block_id] is not None for block_id in self._cached), "a cached block has no hash"
        named = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert named == self._by_hash, "a block is known by a wrong hash"
