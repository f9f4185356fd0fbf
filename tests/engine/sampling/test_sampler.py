"""The sampler: right distributions, rows independent of each other, faults kept to their row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sampling.rows import make_row, make_sampler, sample, token_of
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken


def row(seed: int = 0, length: int = 1, banned: tuple[int, ...] = (), **params: Any) -> Sequence:
    """A sequence of so many tokens, which must not get some."""
    if banned:
        params |= {"min_tokens": 1, "stop_token_ids": banned}
    return make_row([1] * length, seed=seed, **params)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 400]),
        "top_p": st.sampled_from([1.0, 0.9, 0.2]),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
    }
)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(PARAMS, st.integers(-(2**63), 2**63 - 1), st.booleans()), min_size=2, max_size=6))
def test_a_row_gets_the_same_result_alone_reordered_and_among_others(
    rows: list[tuple[dict[str, Any], int, bool]],
) -> None:
    torch.manual_seed(len(rows))
    logits = torch.randn(len(rows), 300).bfloat16()
    asked = [row(seed, length=9, banned=(1, 2, 3) if bans else (), **params) for params, seed, bans in rows]

    together = sample(logits, asked)
    reversed_ = sample(logits.flip(0), asked[::-1])[::-1]
    alone = [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(asked)]

    assert [token_of(a) for a in together] == [token_of(a) for a in reversed_] == [token_of(a) for a in alone]
    assert together == reversed_
    assert together == alone


def test_greedy_rows_take_the_likeliest_token_whatever_else_they_ask() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])

    results = sample(logits, [row(temperature=0, top_p=0.1, seed=3), row(temperature=0, top_k=2)])

    assert results == [SampledToken(1), SampledToken(0)]


def test_the_smallest_temperature_takes_the_likeliest_token_without_overflow() -> None:
    logits = torch.tensor([[60000.0, 59000.0, -60000.0]]).half().expand(50, -1)

    results = sample(logits, [row(seed=i, temperature=1e-5) for i in range(50)])

    assert {token_of(result) for result in results} == {0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 20)
    expected = sample(logits, [row(seed=i, **params) for i in range(3)])
    logits[1, 7] = bad

    results = sample(logits, [row(seed=i, **params) for i in range(3)])

    assert isinstance(results[1], RowError)
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_a_row_with_all_tokens_banned_fails_alone_and_says_why() -> None:
    logits = torch.zeros(2, 3)

    first, second = sample(logits, [row(banned=(0, 1, 2)), row(banned=(0, 1))])

    assert isinstance(first, RowError)
    assert "min_tokens" in first.message
    assert token_of(second) == 2


def test_banned_ids_beyond_the_vocabulary_are_ignored_and_logits_are_not_changed() -> None:
    logits = torch.tensor([[1.0, 2.0]])

    assert sample(logits, [row(temperature=0, banned=(1, 2, 10**9))]) == [SampledToken(0)]
    assert logits.tolist() == [[1.0, 2.0]]


def test_logprobs_are_the_models_own_before_temperature_and_bans_with_ranks() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    raw = torch.log_softmax(logits[0], 0)

    (result,) = sample(logits, [row(temperature=0, logprobs=3, banned=(1,))])

    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    assert result.logprobs.token_ids == [3, 1, 3, 2]
    assert result.logprobs.logprobs == pytest.approx(raw[[3, 1, 3, 2]].tolist())
    assert result.logprobs.sampled_rank == 2


def test_zero_logprobs_gives_the_sampled_token_alone_and_none_gives_none() -> None:
    with_zero, without = sample(torch.tensor([[1.0, 2.0]] * 2), [row(temperature=0, logprobs=0), row(temperature=0)])

    assert isinstance(with_zero, SampledToken)
    assert with_zero.logprobs is not None
    assert with_zero.logprobs.token_ids == [1]
    assert isinstance(without, SampledToken)
    assert without.logprobs is None


@pytest.mark.parametrize(
    ("num_output", "ignore_eos", "banned"),
    [(0, False, {8, 9, 5}), (2, False, {8, 9, 5}), (3, False, set()), (2, True, {5}), (3, True, set())],
)
def test_min_tokens_bans_every_end_token_until_enough_were_generated(
    num_output: int, ignore_eos: bool, banned: set[int]
) -> None:
    logits = torch.arange(10.0).unsqueeze(0)
    sequence = make_row(
        [3] * (4 + num_output),
        num_output_tokens=num_output,
        temperature=0,
        min_tokens=3,
        stop_token_ids=(5,),
        ignore_eos=ignore_eos,
    )

    (result,) = sample(logits, [sequence], eos_token_ids=(8, 9))

    assert token_of(result) == max(set(range(10)) - banned)


def test_min_tokens_ends_in_the_middle_of_a_batch_that_goes_on() -> None:
    logits = torch.arange(10.0).expand(2, -1)
    sampler = make_sampler(10, eos_token_ids=(9,))
    first, second = make_row([1], temperature=0, min_tokens=1), make_row([1], temperature=0, min_tokens=3)
    answers = []

    for _ in range(4):
        answers.append([token_of(result) for result in sample(logits, [first, second], sampler=sampler)])
        first.token_ids.append(answers[-1][0])
        second.token_ids.append(answers[-1][1])

    assert answers == [[8, 8], [9, 8], [9, 8], [9, 9]]


def test_the_seed_and_the_position_alone_tell_the_draws_of_equal_rows_apart() -> None:
    logits = torch.zeros(1, 1000)

    def draw(seed: int, token_ids: list[int]) -> int:
        return token_of(sample(logits, [make_row(token_ids, seed=seed)])[0])

    assert draw(7, [1, 2]) == draw(7, [3, 4])
    assert len({draw(7, [1, 2]), draw(8, [1, 2]), draw(7, [1, 2, 3]), draw(-(2**63), [1]), draw(2**63 - 1, [1])}) == 5


@pytest.mark.parametrize("width", [4096, 5000])
def test_greedy_rows_in_any_places_among_others_take_the_first_of_their_likeliest_tokens(width: int) -> None:
    logits = torch.randn(9, width, generator=torch.Generator().manual_seed(3))
    logits[0, [7, width - 1]] = 50.0
    logits[4, width - 1] = 50.0
    logits[5, 4090] = float("nan")
    places = [0, 1, 4, 5, 8]
    rows = [row(seed=i, temperature=0) if i in places else row(seed=i, top_k=9) for i in range(9)]

    results = sample(logits, rows)

    assert isinstance(results[5], RowError)
    good = [i for i in places if i != 5]
    assert [token_of(results[i]) for i in good] == logits[good].argmax(1).tolist()
    others = [i for i in range(9) if i not in places]
    assert [results[i] for i in others] == sample(logits[others], [rows[i] for i in others])
