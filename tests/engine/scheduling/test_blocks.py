"""BlockPool: no block is lost or doubled, and a block is found exactly by what it holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.engine.scheduling.blocks import BlockPool
from trio_llm.engine.scheduling.kv_event_log import KVEventLog
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved


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


@pytest.mark.parametrize("wrong", [[0, 0], [1], [0, 1]])
def test_releasing_what_is_not_held_is_refused(wrong: list[int]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]

    with pytest.raises(AssertionError, match="not held"):
        pool.release(wrong)


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1]])
def test_check_notices_a_leaked_a_doubled_and_a_stolen_block(held: list[int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [0]

    with pytest.raises(AssertionError):
        pool.check(held)


# ----------------------------------------------------------------------------------------- the cache

A, B, C = b"a", b"b", b"c"


def pool_with(hashes: list[bytes], *, num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    """A pool where one holder has a block of each hash."""
    pool = BlockPool(num_blocks)
    held = pool.allocate(len(hashes))
    assert held is not None
    for block_id, block_hash in zip(held, hashes, strict=True):
        pool.publish(block_id, block_hash)
    return pool, held


def test_the_longest_known_beginning_is_found_whether_held_or_not() -> None:
    pool, held = pool_with([A, B])

    assert pool.find([A, C, B]) == held[:1]
    pool.release(held)
    assert pool.find([A, B, C]) == held
    assert pool.find([C, A]) == []
    assert (pool.num_free, pool.num_cached) == (4, 2)


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool, held = pool_with([A])
    pool.share(held)

    pool.release(held)
    assert pool.num_free == 3
    pool.check(held)
    pool.release(held)

    assert pool.num_free == 4
    pool.check([])


def test_blocks_without_a_hash_are_given_away_before_those_with_one() -> None:
    pool, held = pool_with([A, B])
    pool.release(held)

    pool.allocate(2)

    assert pool.find([A, B]) == held


def test_the_block_released_first_is_given_away_first_and_of_one_sequence_its_tail() -> None:
    pool, held = pool_with([A, B, C], num_blocks=3)
    pool.release(held[2:])
    pool.release(held[:2])

    given = [pool.allocate(1), pool.allocate(1)]

    assert given == [[held[2]], [held[1]]]
    assert pool.find([A]) == held[:1]


def test_a_block_that_was_used_again_is_given_away_later() -> None:
    pool, held = pool_with([A, B], num_blocks=2)
    pool.release(held)
    pool.share(held[1:])
    pool.release(held[1:])

    assert pool.allocate(1) == held[:1]


def test_a_block_that_was_given_away_is_known_no_more() -> None:
    pool, held = pool_with([A], num_blocks=1)
    pool.release(held)
    pool.allocate(1)

    assert pool.find([A]) == []
    pool.check(held)


def test_of_two_blocks_with_the_same_content_one_is_known_and_the_other_is_free_afterwards() -> None:
    pool, held = pool_with([A, A])
    pool.release(held)

    assert pool.find([A]) == held[:1]
    assert pool.num_cached == 1
    pool.check([])


def test_forgotten_blocks_are_not_found_and_those_that_hold_them_go_on() -> None:
    pool, held = pool_with([A, B])
    pool.release(held[1:])

    pool.forget_all()

    assert pool.find([A]) == pool.find([B]) == []
    assert pool.num_cached == 0
    pool.check(held[:1])


def test_a_pool_that_keeps_no_cache_finds_nothing() -> None:
    pool = BlockPool(2, keeps_cache=False)
    held = pool.allocate(1)
    assert held is not None
    pool.publish(held[0], A)

    assert pool.find([A]) == []
    pool.release(held)
    assert pool.num_cached == 0


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    actions=st.lists(
        st.tuples(st.sampled_from(["take", "share", "release", "publish", "forget", "reset"]), st.integers(0, 5)),
        max_size=60,
    ),
)
def test_held_cached_and_free_blocks_are_always_all_blocks(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    log = KVEventLog()
    pool = BlockPool(num_blocks, log=log)
    held: list[int] = []
    hidden: set[int] = set()
    """Held, and not published since."""
    findable: set[bytes] = set()
    """By the events of the log."""
    for action, number in actions:
        match action:
            case "take":
                taken = pool.allocate(number)
                assert (taken is None) == (number > num_blocks - len(set(held)))
                held += taken or []
                hidden.update(taken or [])
            case "share":
                found = pool.find([bytes([number])])
                pool.share(found)
                held += found
            case "release" if held:
                pool.release([held.pop(number % len(held))])
            case "publish" if hidden & set(held):
                block_id = min(hidden & set(held))
                hidden.discard(block_id)
                if pool.publish(block_id, bytes([number])):
                    assert bytes([number]) not in findable
                    findable.add(bytes([number]))
            case "forget":
                pool.forget(held[:1])
            case "reset":
                pool.forget_all()
        for event in log.take():
            if isinstance(event, BlockRemoved):
                findable -= set(event.block_hashes)
            else:
                assert event == AllBlocksCleared()
                findable.clear()
        assert findable == {one for i in range(6) if pool.find([one := bytes([i])])}
        pool.check(held)
        assert pool.num_free == num_blocks - len(set(held))
