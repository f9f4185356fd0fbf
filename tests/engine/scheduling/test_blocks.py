from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.engine.scheduling.blocks import BlockPool


def test_an_allocation_gives_distinct_blocks_and_takes_them_from_the_free_ones() -> None:
    pool = BlockPool(5)

    first, second = pool.allocate(2), pool.allocate(3)

    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert held is not None

    assert pool.allocate(2) is None

    assert pool.num_free == 1
    pool.check(held)


def test_an_allocation_of_no_blocks_succeeds_in_a_full_pool() -> None:
    pool = BlockPool(1)
    pool.allocate(1)

    assert pool.allocate(0) == []


@pytest.mark.parametrize("wrong", [[0, 0], [1], [7]])
def test_freeing_what_is_not_allocated_is_refused(wrong: list[int]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]

    with pytest.raises(AssertionError, match="not allocated"):
        pool.free(wrong)


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1]])
def test_check_notices_a_leaked_a_doubled_and_a_stolen_block(held: list[int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [0]

    with pytest.raises(AssertionError):
        pool.check(held)


@settings(max_examples=100, deadline=None)
@given(num_blocks=st.integers(1, 12), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_free_and_held_blocks_are_always_all_blocks(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for takes, count in actions:
        if takes:
            block_ids = pool.allocate(count)
            assert (block_ids is None) == (count > num_blocks - len(held))
            held += block_ids or []
        else:
            pool.free(held[:count])
            del held[:count]
        pool.check(held)
        assert pool.num_free == num_blocks - len(held)
