"""KVReplica: what a router knows that has applied all KV events, and what must hold of each."""

from __future__ import annotations

from trio_llm.engine.scheduling.block_hash import NO_SALT, extend_hashes
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["KVReplica"]


class KVReplica:
    """
    Args:
        roots: hashes of the salts that there are.
    """

    def __init__(self, *roots: bytes) -> None:
        self.known: set[bytes] = set()
        """The hashes of the blocks that can be found."""
        self.ever: set[bytes | None] = {None, *roots}
        """Those that could be at any time, and what a chain may begin with."""

    def apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                hashes: list[bytes] = []
                extend_hashes(hashes, event.token_ids, event.block_size, root=event.parent_block_hash or NO_SALT)
                assert hashes == event.block_hashes, "the hashes are not those of the tokens"
                assert len(event.token_ids) == len(hashes) * event.block_size > 0
                assert event.parent_block_hash in self.ever, "the parent was never stored"
                assert not self.known & set(hashes), "stored twice"
                self.known.update(hashes)
                self.ever.update(hashes)
            case BlockRemoved():
                assert event.block_hashes, "an event of nothing"
                assert len(set(event.block_hashes)) == len(event.block_hashes), "removed twice"
                assert self.known >= set(event.block_hashes), "removed, but was not there"
                self.known.difference_update(event.block_hashes)
            case AllBlocksCleared():
                self.known.clear()
