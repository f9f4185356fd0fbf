"""20,000 draws with each option follow the exact probabilities of what the option leaves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.sampling.rows import expected_scores, make_row, sample, token_of
from trio_llm.engine.scheduling.sequence import Sequence

NUM_DRAWS = 20_000
NUM_SEEDS = 200
LOGITS = torch.tensor([0.1, 0.4, 0.5, 0.6, 0.9, 1.0, 1.1, 1.2, 1.9, 2.0, 2.1, 2.2])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.3},
    "top_k and top_p": {"top_k": 8, "top_p": 0.8},
    "min_p and top_p": {"min_p": 0.2, "top_p": 0.8},
    "min_p at a low temperature": {"min_p": 0.3, "temperature": 0.4},
    "presence": {"presence_penalty": 1.0},
    "a negative presence": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.8},
    "logit_bias": {"logit_bias": {0: 2.0, 11: -1.5, 4: -2.0}},
    "allowed": {"allowed_token_ids": (0, 3, 8, 11)},
    "bad words": {"bad_words": [[11], [7, 8], [8, 9]]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (10, 11)},
    "all": {
        "temperature": 0.8,
        "top_k": 7,
        "top_p": 0.95,
        "min_p": 0.05,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {0: 1.0, 9: 0.5},
        "allowed_token_ids": tuple(range(11)),
        "bad_words": [[10]],
        "min_tokens": 9,
        "stop_token_ids": (5,),
    },
}


def chi_square_limit(degrees: int) -> float:
    """What a chi-square variable exceeds once in 100,000 times: the approximation of Wilson and Hilferty (1931).

    It is within 1 % of the true quantile for the degrees in use here: 35.2 for 7, where the tables say 35.0.
    """
    normal_quantile = 4.2649
    return degrees * (1 - 2 / (9 * degrees) + normal_quantile * math.sqrt(2 / (9 * degrees))) ** 3


def draw(fields: dict[str, Any]) -> tuple[Sequence, torch.Tensor]:
    """A sequence with the options, and how often each token came next over seeds and positions."""
    # The same output behind prompts of many lengths: scores are equal, positions are not.
    prompt, output = [0, 1, 2], [3, 8, 8, 11]
    rows = [
        make_row([0] * length + prompt + output, num_output_tokens=len(output), **{"seed": seed, **fields})
        for length in range(NUM_DRAWS // NUM_SEEDS)
        for seed in range(NUM_SEEDS)
    ]
    results = sample(LOGITS.expand(NUM_DRAWS, -1), rows)
    tokens = torch.tensor([token_of(result) for result in results])
    return rows[0], torch.bincount(tokens, minlength=len(LOGITS)).double()


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_probabilities(name: str) -> None:
    sequence, counts = draw(OPTIONS[name])
    expected = torch.softmax(expected_scores(LOGITS, sequence), 0) * NUM_DRAWS
    possible = expected > 0

    assert counts.sum() == NUM_DRAWS
    assert counts[~possible].sum() == 0
    degrees = int(possible.sum()) - 1
    assert degrees >= 2
    assert expected[possible].min() > 5  # fewer, and the statistic would not be chi-square
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < chi_square_limit(degrees)


def test_draws_that_are_a_little_off_would_be_found() -> None:
    _, counts = draw({"temperature": 1.15})
    expected = torch.softmax(LOGITS.double(), 0) * NUM_DRAWS

    assert ((counts - expected) ** 2 / expected).sum() > chi_square_limit(len(LOGITS) - 1)
