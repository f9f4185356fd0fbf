"""The hash chain: a hash stands for all tokens up to the end of its block, and for the salt before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_llm.engine.scheduling.block_hash import NO_SALT, extend_hashes, salted

BLOCK_SIZE = 4


def hashes_of(token_ids: list[int], *, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, BLOCK_SIZE, root=salted(cache_salt=salt))
    return hashes


def test_only_full_blocks_have_a_hash_and_each_has_16_bytes() -> None:
    assert [len(hashes_of([1] * count)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert {len(one) for one in hashes_of([1] * 8)} == {16}


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([1, 2, 3, 9, 5, 6, 7, 8])

    assert one[0] != other[0]
    assert one[1] != other[1]


def test_neither_the_order_of_tokens_nor_of_blocks_is_lost() -> None:
    assert hashes_of([1, 2, 3, 4]) != hashes_of([2, 1, 3, 4])
    assert set(hashes_of([1] * 4 + [2] * 4)).isdisjoint(hashes_of([2] * 4 + [1] * 4))


def test_chains_with_different_salts_share_nothing() -> None:
    chains = [hashes_of([1] * 8, salt=salt) for salt in (None, "", "a", "b")]

    assert len({one for chain in chains for one in chain}) == 8
    assert salted(cache_salt=None) == NO_SALT


@given(token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_hashes_that_come_bit_by_bit_are_those_of_the_whole(token_ids: list[int], cuts: list[int]) -> None:
    hashes: list[bytes] = []
    for end in [*sorted(cuts), len(token_ids)]:
        extend_hashes(hashes, token_ids[:end], BLOCK_SIZE, root=NO_SALT)

    assert hashes == hashes_of(token_ids)
