from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.sequence import TRANSITIONS, SequenceQueue, SequenceState


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceState, SequenceState)))
def test_a_state_changes_along_the_table_and_no_other_way(old: SequenceState, new: SequenceState) -> None:
    sequence = make_sequence("a", [1])
    sequence.state = old

    if new in TRANSITIONS[old]:
        sequence.move_to(new)
        assert sequence.state is new
    else:
        with pytest.raises(AssertionError):
            sequence.move_to(new)
        assert sequence.state is old


def test_a_finished_sequence_stays_finished() -> None:
    assert TRANSITIONS[SequenceState.FINISHED] == frozenset()


@given(priorities=st.lists(st.integers(-2, 2), min_size=1), data=st.data())
def test_a_queue_holds_its_sequences_by_priority_then_arrival(priorities: list[int], data: st.DataObject) -> None:
    sequences = [make_sequence(str(i), [1], priority=priority) for i, priority in enumerate(priorities)]
    for arrival, sequence in enumerate(sequences):
        sequence.arrival = arrival
    queue = SequenceQueue()
    for sequence in data.draw(st.permutations(sequences)):
        queue.add(sequence)
    gone = data.draw(st.sets(st.sampled_from(sequences), max_size=len(sequences) - 1))
    for sequence in gone:
        queue.remove(sequence)

    expected = sorted((s for s in sequences if s not in gone), key=lambda s: (s.priority, s.arrival))
    assert list(queue) == expected
    assert len(queue) == len(expected)
    assert queue.last is expected[-1]


def test_removing_from_the_wrong_queue_is_refused() -> None:
    queue = SequenceQueue()
    queue.add(make_sequence("a", [1]))

    for priority in (-1, 0, 1):
        with pytest.raises(AssertionError, match="not in this queue"):
            queue.remove(make_sequence("b", [1], priority=priority))
