"""Sessions in the scheduler: what an input adds to a sequence, and the blocks that those keep which do not run.

Pure. Owned by the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trio_llm.engine.scheduling.blocks import BlockPool
from trio_llm.engine.scheduling.sequence import Sequence, SequenceQueue, SequenceState
from trio_llm.wire.messages import Continue

__all__ = ["IdleBlocks", "extend"]


def extend(sequence: Sequence, message: Continue, max_model_len: int) -> str | None:
    """Put an input behind all that a session has. What was computed stays so; the last token of an answer never was.

    Returns:
        Why it cannot be, which the front end should have seen; then nothing is changed.
    """
    if sequence.state is not SequenceState.IDLE:
        return "an input came before the answer to the one before was over"
    if not message.token_ids:
        return "the input has no tokens"
    if len(sequence.token_ids) + len(message.token_ids) >= max_model_len:
        num_tokens = len(sequence.token_ids) + len(message.token_ids)
        return f"{num_tokens} tokens of the session leave no room for an answer within {max_model_len}"
    sequence.num_earlier_tokens = sequence.next_start
    sequence.token_ids.extend(message.token_ids)
    sequence.num_prompt_tokens = len(sequence.token_ids)
    sequence.params = message.params
    sequence.bad_words = message.bad_words_token_ids
    return None


class IdleBlocks:
    """The sequences that hold blocks without running: idle sessions, and those that wait with a new input.

    Their blocks save time and nothing else, so whoever runs may have them: the sessions are computed again then.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keepers = SequenceQueue()

    def __bool__(self) -> bool:
        return len(self._keepers) > 0

    def add(self, sequence: Sequence) -> None:
        """It does not run now. Of no effect if it has no blocks."""
        if sequence.block_ids:
            self._keepers.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It runs or ends now. Of no effect if it has no blocks: then it is not here."""
        if sequence.block_ids:
            self._keepers.remove(sequence)

    def can_give(self, count: int, *, but: Sequence) -> bool:
        """`take` from all but `but` would free `count` blocks: those that nobody else shares."""
        others = [sequence for sequence in self._keepers if sequence is not but]
        if sum(len(sequence.block_ids) for sequence in others) < count:
            return False
        num_kept = Counter(block_id for sequence in others for block_id in sequence.block_ids)
        return sum(self._pool.num_holders(block_id) == held for block_id, held in num_kept.items()) >= count

    def take(self, count: int, *, but: Sequence) -> int:
        """Take blocks from others than `but`, the latest first, until `count` are free in all, or none is left.

        Returns:
            How many sequences have lost theirs.
        """
        num_evicted = 0
        # A copy: the queue changes.
        for sequence in reversed(list(self._keepers)):
            if self._pool.num_free >= count:
                break
            if sequence is not but:
                self._lose(sequence)
                num_evicted += 1
        return num_evicted

    def take_all(self) -> int:
        """Take all blocks from all. Returns how many sequences have lost theirs."""
        keepers = list(self._keepers)
        for sequence in reversed(keepers):
            self._lose(sequence)
        return len(keepers)

    def _lose(self, sequence: Sequence) -> None:
        self._keepers.remove(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1

    def check(self, resting: Iterable[Sequence], block_size: int) -> None:
        """Assert that the sequences which do not run are here exactly if they have blocks, and are consistent."""
        with_blocks = []
        for sequence in resting:
            if not sequence.block_ids:
                assert sequence.num_computed_tokens == 0
                continue
            with_blocks.append(sequence)
            assert sequence.is_resumable, f"{sequence.request_id} holds blocks and does not run"
            assert 0 < sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * block_size
        assert {sequence.request_id for sequence in with_blocks} == {one.request_id for one in self._keepers}
        assert len(with_blocks) == len(self._keepers)
