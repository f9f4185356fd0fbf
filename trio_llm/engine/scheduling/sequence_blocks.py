"""SequenceBlocks: gives sequences their KV blocks, those of the prefix cache among them, and takes them back.

Pure. Owned by the scheduler, which decides which sequence gets blocks and which loses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from trio_llm.engine.scheduling.block_hash import extend_hashes
from trio_llm.engine.scheduling.blocks import BlockPool
from trio_llm.engine.scheduling.kv_event_log import KVEventLog
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.sessions import IdleBlocks

__all__ = ["SequenceBlocks"]


class SequenceBlocks:
    """The pool, seen from the sequences.

    A block can be found by its hash as soon as the step that fills it is planned. A sequence that is planned later,
    even in the same step, reads the block after it was written, since a layer writes K and V of all rows of a step
    before it attends. So requests with one prompt that come together compute it once, except for its last, unfilled
    block.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.log = KVEventLog() if limits.logs_kv_events else None
        """Changes of the cache; None: the configuration does not ask for them."""
        self._pool = BlockPool(limits.num_blocks, keeps_cache=limits.keeps_cache, log=self.log)
        self.idle = IdleBlocks(self._pool)
        """Sequences that hold blocks without running."""

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that the sequence needs for all its tokens and does not have."""
        return self._limits.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def admit(self, sequence: Sequence, *, num_spare: int) -> int | None:
        """Give a waiting sequence blocks for all its tokens, sharing those that the cache has.

        Args:
            num_spare: blocks that must be left.
        Returns:
            The number of idle sequences that lost their blocks. None, and nothing is changed, if there are not enough.
        """
        cached = self._find_cached(sequence)
        # Held before others are evicted, so that these are not among the evicted.
        self._pool.share(cached)
        num_needed = self.num_missing(sequence) - len(cached)
        num_evicted = self.make_free(num_needed + num_spare, but=sequence)
        if num_evicted is None:
            self._pool.release(cached)
            return None
        self.idle.remove(sequence)
        sequence.block_ids.extend(cached)
        if cached:
            sequence.num_published_blocks = len(cached)
            sequence.num_computed_tokens = len(cached) * self._limits.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.extend(sequence)
        return num_evicted

    def extend(self, sequence: Sequence) -> None:
        """Give a sequence the blocks that it misses. So many must be free; see `make_free`."""
        num_missing = self.num_missing(sequence)
        block_ids = self._pool.allocate(num_missing)
        assert block_ids is not None, f"{num_missing} blocks wanted, {self._pool.num_free} free"
        sequence.block_ids.extend(block_ids)

    def make_free(self, count: int, *, but: Sequence) -> int | None:
        """Free blocks of idle sequences, but not of `but`, until `count` blocks are free.

        Returns:
            The number of sequences that lost their blocks. None, and nothing is changed, if they have too few.
        """
        if count <= self._pool.num_free:
            return 0
        if not self.idle or not self.idle.can_give(count - self._pool.num_free, but=but):
            return None
        return self.idle.take(count, but=but)

    def take_all(self, sequence: Sequence) -> list[int]:
        """Take all blocks from a sequence. The caller must `release` them."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.num_published_blocks = 0
        return block_ids

    def release(self, block_ids: list[int]) -> None:
        self._pool.release(block_ids)

    def publish(self, sequence: Sequence) -> None:
        """Let the blocks be found that are full when the steps in flight are retired, as far as their tokens are known.

        To be called when a step is planned.
        """
        if not self._limits.keeps_cache:
            return
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = num_known // self._limits.block_size
        if num_full <= sequence.num_published_blocks:
            return
        self._hash(sequence)
        start, sequence.num_published_blocks = sequence.num_published_blocks, num_full
        for i in range(start, num_full):
            is_new = self._pool.publish(sequence.block_ids[i], sequence.block_hashes[i])
            if self.log is not None and not is_new:
                self._log_stored(sequence, start, i, self.log)
                start = i + 1
        if self.log is not None:
            self._log_stored(sequence, start, num_full, self.log)

    def _log_stored(self, sequence: Sequence, start: int, end: int, log: KVEventLog) -> None:
        """Log that the sequence's blocks from number `start` to `end - 1`, if there are any, have entered the cache."""
        if start == end:
            return
        hashes, block_size = sequence.block_hashes, self._limits.block_size
        log.stored(
            hashes[start:end],
            parent=hashes[start - 1] if start else sequence.cache_root or None,
            token_ids=sequence.token_ids[start * block_size : end * block_size],
            block_size=block_size,
        )

    def forget(self, sequence: Sequence) -> None:
        """Let no sequence find these blocks: what was computed in them is not sound."""
        self._pool.forget(sequence.block_ids)

    def forget_all(self) -> None:
        """Let no sequence find any block. Sequences keep the blocks that they hold."""
        self._pool.forget_all()

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Cached blocks with the sequence's first tokens. The last token is always computed: it gives the next one."""
        params = sequence.params
        needs_logits = params.prompt_logprobs is not None and sequence.next_prompt_logprob < sequence.num_prompt_tokens
        needs_hidden = sequence.pooling is not None and sequence.pooling.is_mean
        # The cache has K and V, but neither logits nor hidden states.
        if sequence.block_ids or needs_logits or needs_hidden or not self._limits.keeps_cache:
            return []
        self._hash(sequence)
        return self._pool.find(islice(sequence.block_hashes, (sequence.num_tokens - 1) // self._limits.block_size))

    def _hash(self, sequence: Sequence) -> None:
        extend_hashes(sequence.block_hashes, sequence.token_ids, self._limits.block_size, root=sequence.cache_root)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the pool agrees with `held`, the blocks of all holders."""
        self._pool.check(held)
