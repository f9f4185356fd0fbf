"""Every option and every pair of options, in one batch: against one row at a time, and against transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.sampling.rows import (
    Results,
    expected_scores,
    expected_token,
    make_row,
    make_sampler,
    noise_of,
    run,
    sample,
    token_of,
)
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken

WIDTH = 300
EOS = (0, 5)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {3: 5.0, 7: -100.0, 11: 0.25}},
    "allowed": {"allowed_token_ids": tuple(range(1, 120))},
    "bad_words": {"bad_words": [[9], [8, 12], [3, 4, 20], *[[7, i] for i in range(100, 200)]]},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (17,)},
    "ignore_eos": {"min_tokens": 3, "stop_token_ids": (3,), "ignore_eos": True},
    "logprobs": {"logprobs": 5},
}
PAIRS = [*((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2), tuple(OPTIONS)]
"""Each option alone, each pair, and all at once."""


def settings_of(names: tuple[str, ...]) -> dict[str, Any]:
    """Of the same field, that of the first name counts."""
    fields: dict[str, Any] = {}
    for name in names:
        fields = OPTIONS[name] | fields
    return fields


def make_rows(chosen: list[tuple[str, ...]] = PAIRS, *, seed: int = 0) -> list[Sequence]:
    """A sequence for each choice, with tokens before it that penalties and bad words meet."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, names in enumerate(chosen):
        length = 2 + number % 13
        tokens = torch.randint(0, 14, (length,), generator=generator).tolist()
        rows.append(
            make_row(tokens, num_output_tokens=number % min(length, 5), **{"seed": number, **settings_of(names)})
        )
    return rows


def random_logits(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2


def logits_at(sequence: Sequence, length: int) -> Tensor:
    """As of a model: fixed by the sequence and the position."""
    assert sequence.params.seed is not None
    generator = torch.Generator().manual_seed(1000 * sequence.params.seed + length)
    return torch.randn(WIDTH, generator=generator) * 2


def tokens_of(steps: list[Results]) -> list[list[int]]:
    return [[token_of(result) for result in step] for step in steps]


# ------------------------------------------------------------------------------------ each option


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_what_some_rows_get(name: str) -> None:
    logits = random_logits(200)
    plain = [make_row([1, 2, 3, 8], num_output_tokens=2, seed=i) for i in range(200)]
    fields = {"stop_token_ids": tuple(range(1, 120))} if name in ("min_tokens", "ignore_eos") else {}
    changed = [
        make_row([1, 2, 3, 8], num_output_tokens=2, **{"seed": i, **OPTIONS[name], **fields}) for i in range(200)
    ]

    before, after = sample(logits, plain), sample(logits, changed)

    assert before != after


PROCESSORS: dict[str, Any] = {
    "temperature": TemperatureLogitsWarper(0.7),
    "top_k": TopKLogitsWarper(20),
    "top_p": TopPLogitsWarper(0.8),
    "min_p": MinPLogitsWarper(0.05),
    "repetition": RepetitionPenaltyLogitsProcessor(1.4),
    "logit_bias": SequenceBiasLogitsProcessor([[[i], bias] for i, bias in OPTIONS["logit_bias"]["logit_bias"].items()]),
    "bad_words": NoBadWordsLogitsProcessor(OPTIONS["bad_words"]["bad_words"]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_option_draws_from_what_transformers_processor_makes_of_the_scores(name: str) -> None:
    rows = make_rows([(name,)] * 100)
    logits = random_logits(len(rows))

    results = sample(logits, rows)

    for row, one, result in zip(logits, rows, results, strict=True):
        processed = PROCESSORS[name](torch.tensor([one.token_ids]), row.unsqueeze(0))[0]
        assert one.params.seed is not None
        assert token_of(result) == int((processed + noise_of(one.params.seed, len(one.token_ids), WIDTH)).argmax())


# --------------------------------------------------------------------------------- all in one batch


def test_every_pair_of_options_gives_in_one_batch_what_plain_rules_give_one_row() -> None:
    rows = make_rows()
    logits = random_logits(len(rows))

    results = sample(logits, rows, eos_token_ids=EOS)

    for names, row, one, result in zip(PAIRS, logits, rows, results, strict=True):
        assert token_of(result) == expected_token(row, one, EOS), names


def test_every_pair_of_options_gives_the_same_alone_and_in_any_order() -> None:
    rows = make_rows()
    logits = random_logits(len(rows))

    together = sample(logits, rows, eos_token_ids=EOS)
    reordered = sample(logits.flip(0), rows[::-1], eos_token_ids=EOS)[::-1]
    alone = [sample(logits[i : i + 1], [one], eos_token_ids=EOS)[0] for i, one in enumerate(rows)]

    assert [token_of(result) for result in together] == [token_of(result) for result in reordered]
    assert [token_of(result) for result in together] == [token_of(result) for result in alone]
    for names, result in zip(PAIRS, together, strict=True):
        assert isinstance(result, SampledToken)
        assert (result.logprobs is not None) == ("logprobs" in names)


def test_a_plain_neighbour_of_any_pair_of_options_gets_what_it_gets_alone() -> None:
    rows = make_rows()
    neighbours = [make_row([1, 2], seed=i, temperature=i % 2) for i in range(len(rows))]
    logits = random_logits(2 * len(rows))
    alone = sample(logits[1::2], neighbours)

    for names, one, neighbour, i in zip(PAIRS, rows, neighbours, itertools.count(), strict=False):
        pair = sample(logits[2 * i : 2 * i + 2], [one, neighbour], eos_token_ids=EOS)
        assert pair[1] == alone[i], names


@pytest.mark.parametrize("is_late", [False, True])
def test_over_many_steps_every_row_gets_what_plain_rules_give(is_late: bool) -> None:
    rows = make_rows()
    begins = [len(one.token_ids) for one in rows]
    twins = make_rows()

    steps = tokens_of(run(make_sampler(WIDTH, EOS), rows, logits_at=logits_at, num_steps=9, is_late=is_late))

    for i, twin in enumerate(twins):
        for n, step in enumerate(steps):
            assert len(twin.token_ids) == begins[i] + n
            assert step[i] == expected_token(logits_at(twin, len(twin.token_ids)), twin, EOS), (PAIRS[i], n)
            twin.token_ids.append(step[i])


def test_bfloat16_logits_are_taken_as_the_float32_that_they_are() -> None:
    rows = make_rows()
    logits = random_logits(len(rows)).bfloat16()
    copy = logits.clone()

    half, full = sample(logits, rows, eos_token_ids=EOS), sample(logits.float(), rows, eos_token_ids=EOS)

    assert [token_of(result) for result in half] == [token_of(result) for result in full]
    assert torch.equal(logits, copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = random_logits(4).to(dtype)
    copy = logits.clone()

    for name in OPTIONS:
        sample(logits, make_rows([(name,)] * 4), eos_token_ids=EOS)
        sample(logits, make_rows([(name,), ("top_k",), ("greedy",), (name,)]), eos_token_ids=EOS)

    assert torch.equal(logits, copy)


@pytest.mark.parametrize("width", [4096, 4097, 40_000])
def test_wide_rows_give_the_same_alone_and_all_together(width: int) -> None:
    """What a CPU does by blocks of rows and chunks of tokens."""
    chosen = [("temperature",), ("greedy",), ("top_k",), ("logit_bias", "greedy"), ("frequency", "min_p"), ()] * 3
    rows = make_rows(chosen)
    logits = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(5))

    together = sample(logits, rows)

    for i, one in enumerate(rows):
        assert together[i] == sample(logits[i : i + 1], [one])[0]
        assert token_of(together[i]) == expected_token(logits[i], one)


@pytest.mark.parametrize("width", [4096, 5000])
@pytest.mark.parametrize("place", [0, 255, 256, 4095, -1])
def test_the_likeliest_of_many_tokens_is_found_wherever_it_is_and_the_first_of_equals(width: int, place: int) -> None:
    logits = torch.zeros(3, width)
    logits[0, place] = 1.0
    logits[1, place] = float("nan")
    logits[2, [place, width - 1]] = float("inf")

    first, second, third = sample(logits, [make_row(temperature=0)] * 3)
    (equal,) = sample(torch.where(logits[:1] == 1.0, -1.0, logits[:1]), [make_row(temperature=0)])

    assert token_of(first) == place % width
    assert isinstance(second, RowError)
    assert isinstance(third, RowError)
    assert token_of(equal) == (1 if place == 0 else 0)


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_finite_scores_fail_alone_whatever_their_options(bad: float) -> None:
    rows = make_rows()
    logits = random_logits(len(rows))
    expected = sample(logits, rows, eos_token_ids=EOS)
    for remainder in range(3):
        spoilt = logits.clone()
        spoilt[remainder::3] = bad

        results = sample(spoilt, rows, eos_token_ids=EOS)

        for i, (result, fine) in enumerate(zip(results, expected, strict=True)):
            if i % 3 == remainder:
                assert isinstance(result, RowError), PAIRS[i]
            else:
                assert result == fine, PAIRS[i]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_score_that_is_not_finite_fails_its_row_whatever_its_options(bad: float) -> None:
    rows = make_rows()
    logits = random_logits(len(rows))
    logits[:, 250] = bad  # not among the allowed ones

    results = sample(logits, rows, eos_token_ids=EOS)

    for names, result in zip(PAIRS, results, strict=True):
        assert isinstance(result, RowError), names
        assert "NaN" in result.message


def test_a_failed_row_has_a_token_of_the_vocabulary_on_the_device() -> None:
    logits = torch.full((3, 10), float("nan"))
    logits[1] = float("-inf")
    rows = [make_row([1], top_p=0.5), make_row([1], temperature=0), make_row([1], logit_bias={1: 1.0})]

    pending = make_sampler(10).launch(logits, rows, positions=[1, 1, 1], previous=torch.tensor([1, 1, 1]))

    assert 0 <= int(pending.token_ids.min()) <= int(pending.token_ids.max()) < 10
    assert all(isinstance(result, RowError) for result in pending.wait())


@settings(max_examples=30, deadline=None)
@given(
    chosen=st.lists(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=6), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_any_options_together_give_what_plain_rules_give(chosen: list[set[str]], seed: int) -> None:
    rows = make_rows([tuple(sorted(names)) for names in chosen], seed=seed)
    logits = random_logits(len(rows), seed)

    results = sample(logits, rows, eos_token_ids=EOS)

    for row, one, result in zip(logits, rows, results, strict=True):
        scores = expected_scores(row, one, EOS)
        assert scores[token_of(result)] > float("-inf")
        assert token_of(result) == expected_token(row, one, EOS)
