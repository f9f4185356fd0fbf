"""Tokens that must not come, against transformers' own processor; tokens that alone may come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from tests.engine.sampling.rows import sample
from tests.support.sequences import make_sequence
from trio_llm.engine.sampling.logits_processors.bans import banned_tokens
from trio_llm.engine.scheduling.step import RowError, SampledToken
from trio_llm.sampling import SamplingParams

WIDTH = 6
EOS = (0,)

ids = st.integers(0, WIDTH - 1)


@given(
    token_ids=st.lists(ids, min_size=1, max_size=6),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_what_is_banned_is_what_transformers_bans(token_ids: list[int], bad_words: list[list[int]]) -> None:
    processor = NoBadWordsLogitsProcessor(bad_words)
    processed = processor(torch.tensor([token_ids]), torch.zeros(1, WIDTH))
    expected = set(torch.isinf(processed[0]).nonzero().flatten().tolist())

    assert banned_tokens(make_sequence("a", token_ids, bad_words=bad_words), EOS) == expected


def test_a_word_that_the_prompt_has_begun_cannot_be_completed() -> None:
    sequence = make_sequence("a", [3, 4], bad_words=[[4, 5]])

    assert banned_tokens(sequence, EOS) == {5}


def test_ends_are_banned_before_min_tokens_and_words_always() -> None:
    params = SamplingParams(seed=0, min_tokens=2, stop_token_ids=(4,))

    early = make_sequence("a", [1], params, bad_words=[[5]])
    late = make_sequence("a", [1], params, generated=[2, 3], bad_words=[[5]])

    assert banned_tokens(early, EOS) == {0, 4, 5}
    assert banned_tokens(late, EOS) == {5}


@given(logits=st.lists(st.floats(-5, 5, width=32), min_size=WIDTH, max_size=WIDTH), allowed=st.sets(ids, min_size=1))
def test_the_likeliest_of_the_allowed_tokens_is_taken_and_log_probabilities_are_the_model_s(
    logits: list[float], allowed: set[int]
) -> None:
    rows = torch.tensor([logits])
    params = SamplingParams(seed=0, temperature=0, allowed_token_ids=tuple(allowed), logprobs=0)

    (result,) = sample(rows, [make_sequence("a", [1], params)], eos_token_ids=EOS)

    assert isinstance(result, SampledToken)
    assert result.token_id in allowed
    assert logits[result.token_id] == max(logits[i] for i in allowed)
    assert result.logprobs is not None
    assert result.logprobs.logprobs[0] == pytest.approx(torch.log_softmax(rows, 1)[0, result.token_id].item())


def test_a_drawn_token_is_an_allowed_one_and_the_other_rows_are_as_without_it() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(40, -1)
    free = [make_sequence("a", [1], SamplingParams(seed=i), generated=[1] * i) for i in range(40)]
    bound = [
        make_sequence("a", [1], SamplingParams(seed=i, allowed_token_ids=(7, 9)), generated=[1] * i) for i in range(40)
    ]

    mixed = sample(logits, [bound[i] if i % 2 else free[i] for i in range(40)])
    alone = sample(logits, free)

    assert {r.token_id for r in mixed[1::2] if isinstance(r, SampledToken)} == {7, 9}
    assert mixed[::2] == alone[::2]


def test_parameters_that_leave_no_token_are_the_error_of_their_row_alone() -> None:
    logits = torch.zeros(2, WIDTH)
    hopeless = SamplingParams(seed=0, min_tokens=1, allowed_token_ids=EOS)

    first, second = sample(
        logits,
        [make_sequence("a", [1], params) for params in (hopeless, SamplingParams(seed=0))],
        eos_token_ids=EOS,
    )

    assert isinstance(first, RowError)
    assert "allowed_token_ids" in first.message
    assert isinstance(second, SampledToken)


def test_allowed_ids_that_the_model_does_not_have_are_ignored() -> None:
    params = SamplingParams(seed=0, allowed_token_ids=(3, WIDTH, 2**31 - 1))

    (result,) = sample(torch.zeros(1, WIDTH), [make_sequence("a", [1], params)], eos_token_ids=EOS)

    assert isinstance(result, SampledToken)
    assert result.token_id == 3
