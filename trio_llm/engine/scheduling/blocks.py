"""BlockPool: which KV blocks are free and which are in use.

Pure. Owned by the scheduler; nobody else gives or takes blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to num_blocks - 1, each either free or allocated."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        """A stack: what was freed last is likeliest to be in a processor's cache still."""
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None, and nothing taken, if fewer are free."""
        if count > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(count)]
        self._allocated.update(block_ids)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Each must be allocated: freeing twice is a bug of ours."""
        for block_id in block_ids:
            assert block_id in self._allocated, f"block {block_id} is freed but not allocated"
            self._allocated.remove(block_id)
            self._free.append(block_id)

    def check(self, held: Iterable[int]) -> None:
        """Assert that no block is lost or doubled.

        Args:
            held: all blocks that their owners say they have; they must be those allocated.
        """
        held = sorted(held)
        assert held == sorted(self._allocated), f"held {held}, but allocated {sorted(self._allocated)}"
        assert sorted([*self._free, *held]) == list(range(self._num_blocks)), "a block is lost or doubled"
