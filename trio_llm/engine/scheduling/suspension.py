"""Suspension: sets the sequences of clients without credit aside, so that no step computes anything for them.

Pure. Owned by the scheduler.
"""

from __future__ import annotations

from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.sequence_table import SequenceTable

__all__ = ["Suspension"]


class Suspension:
    """Which clients are suspended. Their sequences take no place in a step, and others may take their blocks."""

    def __init__(self, sequences: SequenceTable, blocks: SequenceBlocks) -> None:
        self._sequences = sequences
        self._blocks = blocks
        self._clients: set[int] = set()
        self._coming: set[int] = set()
        """Clients that `apply` will suspend."""

    @property
    def is_due(self) -> bool:
        """`apply` has something to do."""
        return bool(self._coming)

    def suspend(self, client_index: int) -> None:
        """Compute nothing for this client from the next `apply` until `resume`. No effect if it is suspended."""
        if client_index not in self._clients:
            self._coming.add(client_index)

    def resume(self, client_index: int) -> None:
        """Put the client's sequences back to their places in the waiting line. No effect if it is not suspended."""
        self._coming.discard(client_index)
        if client_index not in self._clients:
            return
        self._clients.remove(client_index)
        # A copy: the queue changes.
        for sequence in list(self._sequences.suspended):
            if sequence.client_index == client_index:
                self._sequences.move(sequence, SequenceState.WAITING)

    def apply(self) -> None:
        """Suspend the clients that are to be. No step may be in flight then: it samples tokens for them."""
        if not self._coming:
            return
        running, waiting = list(self._sequences.running), list(self._sequences.waiting)
        for sequence in [*running, *waiting]:
            if sequence.client_index in self._coming:
                assert sequence.num_in_flight == 0, f"{sequence.request_id} is suspended within a step"
                self._sequences.move(sequence, SequenceState.SUSPENDED)
        for sequence in running:
            if sequence.state is SequenceState.SUSPENDED:
                self._blocks.idle.add(sequence)
        self._clients |= self._coming
        self._coming.clear()

    def place(self, sequence: Sequence) -> None:
        """Suspend a sequence that has begun to wait, if its client is suspended."""
        if sequence.client_index in self._clients:
            self._sequences.move(sequence, SequenceState.SUSPENDED)

    def check(self) -> None:
        """Assert that exactly the sequences of suspended clients that could be computed are set aside."""
        assert not self._clients & self._coming
        assert {sequence.client_index for sequence in self._sequences.suspended} <= self._clients
        for sequence in (*self._sequences.waiting, *self._sequences.running):
            assert sequence.client_index not in self._clients, f"{sequence.request_id} is not suspended"
