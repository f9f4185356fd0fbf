"""SequenceBlocks: gives sequences their KV blocks, finds what the cache holds for them, and takes all back.

Pure. Owned by the scheduler, which decides who gets blocks and who must give way.
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

    A block may be found by its hash from the moment on when the step that fills it is planned: whoever is planned
    later, also into the same step, reads it after it was written, since a layer writes K and V of all rows of a step
    before it attends. So requests with one prompt that come together compute it once, but for its last, unfilled block.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.log = KVEventLog() if limits.logs_kv_events else None
        """What enters and leaves the cache; None: nobody wants to know."""
        self._pool = BlockPool(limits.num_blocks, keeps_cache=limits.keeps_cache, log=self.log)
        self.idle = IdleBlocks(self._pool)
        """Sequences that do not run and hold blocks all the same."""

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that the sequence needs for all its tokens, and does not have."""
        return self._limits.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def admit(self, sequence: Sequence, *, num_spare: int) -> int | None:
        """Give a waiting sequence blocks for all its tokens, those that the cache holds among them.

        Args:
            num_spare: blocks that must be left.
        Returns:
            None, and nothing is changed, if there are not enough. Else how many others lost blocks that they kept.
        """
        cached = self._find_cached(sequence)
        # Held before anything is taken, so that they are not what is taken.
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
        """Give a sequence what it misses. There must be so many: see `make_free`."""
        num_missing = self.num_missing(sequence)
        block_ids = self._pool.allocate(num_missing)
        assert block_ids is not None, f"{num_missing} blocks wanted, {self._pool.num_free} free"
        sequence.block_ids.extend(block_ids)

    def make_free(self, count: int, *, but: Sequence) -> int | None:
        """See to it that `count` blocks are free, at the cost of those that hold blocks without running, but not of
        `but`.

        Returns:
            None, and nothing is changed, if there are not so many. Else how many lost theirs.
        """
        if count <= self._pool.num_free:
            return 0
        if not self.idle or not self.idle.can_give(count - self._pool.num_free, but=but):
            return None
        return self.idle.take(count, but=but)

    def take_all(self, sequence: Sequence) -> list[int]:
        """A sequence's blocks, which it then has no more; `release` them."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.num_published_blocks = 0
        return block_ids

    def release(self, block_ids: list[int]) -> None:
        self._pool.release(block_ids)

    def publish(self, sequence: Sequence) -> None:
        """Let the blocks be found that are full when the steps in flight are through, as far as their tokens are known.

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
                self._tell_stored(sequence, start, i, self.log)
                start = i + 1
        if self.log is not None:
            self._tell_stored(sequence, start, num_full, self.log)

    def _tell_stored(self, sequence: Sequence, start: int, end: int, log: KVEventLog) -> None:
        """The sequence's blocks from number `start` to `end - 1`, if there are any, have entered the cache."""
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
        """Let nobody find this sequence's blocks: what was computed for it is not sound."""
        self._pool.forget(sequence.block_ids)

    def forget_all(self) -> None:
        """Let nobody find any block. Sequences keep what they have."""
        self._pool.forget_all()

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's first tokens, to the last but one at most: the last gives the next token."""
        params = sequence.params
        wants_scores = params.prompt_logprobs is not None and sequence.next_prompt_logprob < sequence.num_prompt_tokens
        # Hidden states are not in the cache: a mean needs those of all tokens.
        wants_all = wants_scores or (sequence.pooling is not None and sequence.pooling.is_mean)
        if sequence.block_ids or wants_all or not self._limits.keeps_cache:
            return []
        self._hash(sequence)
        return self._pool.find(islice(sequence.block_hashes, (sequence.num_tokens - 1) // self._limits.block_size))

    def _hash(self, sequence: Sequence) -> None:
        extend_hashes(sequence.block_hashes, sequence.token_ids, self._limits.block_size, root=sequence.cache_root)

    def check(self, held: Iterable[int]) -> None:
        """Assert that `held`, the blocks of all who hold any, are those that the pool knows of."""
        self._pool.check(held)
