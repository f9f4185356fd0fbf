"""Sessions in the scheduler: what an input adds to a sequence. And the blocks of sequences that do not run.

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
    """Append an input to the tokens of a session. What was computed stays valid; the last token of an answer never was
    computed.

    Returns:
        Why the session cannot take the input, which the front end should have seen; then nothing is changed.
    """
    if sequence.state is not SequenceState.IDLE:
        return "an input came before the answer to the input before it was finished"
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
    """The sequences that hold blocks without running: idle sessions, sessions that wait with a new input, sequences of
    clients without credit, and those that wait after that.

    Their blocks only save time, so running sequences may take them; what was in them is computed again then.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holders = SequenceQueue()

    def __bool__(self) -> bool:
        return len(self._holders) > 0

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that does not run. No effect if it has no blocks."""
        if sequence.block_ids:
            self._holders.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that runs or ends now. No effect if it has no blocks: then it is not here."""
        if sequence.block_ids:
            self._holders.remove(sequence)

    def can_give(self, count: int, *, but: Sequence) -> bool:
        """Whether `take` could free `count` blocks. A block that a running sequence shares is not freed."""
        others = [sequence for sequence in self._holders if sequence is not but]
        if sum(len(sequence.block_ids) for sequence in others) < count:
            return False
        num_held = Counter(block_id for sequence in others for block_id in sequence.block_ids)
        return sum(self._pool.num_holders(block_id) == held for block_id, held in num_held.items()) >= count

    def take(self, count: int, *, but: Sequence) -> int:
        """Take the blocks of one sequence after the other, the latest first and never `but`, until `count` are free.

        Returns:
            The number of sequences that lost their blocks.
        """
        num_evicted = 0
        # A copy: the queue changes.
        for sequence in reversed(list(self._holders)):
            if self._pool.num_free >= count:
                break
            if sequence is not but:
                self._evict(sequence)
                num_evicted += 1
        return num_evicted

    def take_all(self) -> int:
        """Take the blocks of all. Returns the number of sequences that lost theirs."""
        holders = list(self._holders)
        for sequence in reversed(holders):
            self._evict(sequence)
        return len(holders)

    def _evict(self, sequence: Sequence) -> None:
        self._holders.remove(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1

    def check(self, not_running: Iterable[Sequence], block_size: int) -> None:
        """Assert that a sequence that does not run is here exactly if it has blocks, and is consistent."""
        with_blocks = []
        for sequence in not_running:
            if not sequence.block_ids:
                assert sequence.num_computed_tokens == 0
                continue
            with_blocks.append(sequence)
            assert sequence.is_resumable or sequence.has_begun, f"{sequence.request_id} holds blocks and never ran"
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * block_size
        assert {sequence.request_id for sequence in with_blocks} == {one.request_id for one in self._holders}
        assert len(with_blocks) == len(self._holders)
