"""SequenceTable: all unfinished sequences, and the queue that each of them stands in.

Pure. Owned by the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trio_llm.engine.scheduling.sequence import Sequence, SequenceQueue, SequenceState

__all__ = ["SequenceTable"]


class SequenceTable:
    """Keeps states and queues together: a sequence is in `waiting`, `running` or `suspended` exactly if its state says
    so.

    Idle sequences are in no queue, and finished ones are not in the table.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.suspended = SequenceQueue()
        self._queues = {
            SequenceState.WAITING: self.waiting,
            SequenceState.RUNNING: self.running,
            SequenceState.SUSPENDED: self.suspended,
        }
        self._num_arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, which must be `WAITING`, at the end of its priority."""
        assert sequence.request_id not in self._by_id, f"{sequence.request_id} is here already"
        assert sequence.state is SequenceState.WAITING
        self._by_id[sequence.request_id] = sequence
        self._set_arrival(sequence)
        self.waiting.add(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put an idle sequence at the end of its priority, as a new one would be."""
        assert sequence.state is SequenceState.IDLE
        self._set_arrival(sequence)
        self.move(sequence, SequenceState.WAITING)

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change the state along `TRANSITIONS`, and the queue with it. Arrival and so the order stay."""
        if sequence.state in self._queues:
            self._queues[sequence.state].remove(sequence)
        sequence.move_to(state)
        if state in self._queues:
            self._queues[state].add(sequence)
        elif state is SequenceState.FINISHED:
            del self._by_id[sequence.request_id]

    def _set_arrival(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals

    def next_waiting(self, *, only_begun: bool) -> Sequence | None:
        """The sequence to admit next.

        Args:
            only_begun: leave out those whose answer has not begun.
        """
        return next((one for one in self.waiting if one.has_begun or not only_begun), None)

    @property
    def num_new(self) -> int:
        """Waiting sequences whose answer has not begun. Costs a walk over all that wait."""
        return sum(not sequence.has_begun for sequence in self.waiting)

    def find_expired(self, now_s: float) -> list[Sequence]:
        """Waiting sequences whose deadline has passed and of which nothing was computed, here or in an earlier
        incarnation. `now_s` is on the clock of `Sequence.expires_at`."""
        return [
            sequence
            for sequence in self.waiting
            if sequence.expires_at is not None and sequence.expires_at <= now_s and not sequence.has_begun
        ]

    def count_owed_tokens(self) -> Counter[int]:
        """By client: the sum of `Sequence.num_owed_tokens`."""
        owed: Counter[int] = Counter()
        for sequence in self:
            owed[sequence.client_index] += sequence.num_owed_tokens
        return owed

    def check(self) -> None:
        """Assert that queues are in order and that each sequence stands where its state says."""
        for state, queue in self._queues.items():
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(set(orders)), "a queue is out of order"
            for sequence in queue:
                assert sequence.state is state
                assert self._by_id[sequence.request_id] is sequence
        num_idle = sum(sequence.state is SequenceState.IDLE for sequence in self)
        assert sum(map(len, self._queues.values())) + num_idle == len(self._by_id), "a sequence is lost"
