"""SamplingParams: every wrong value names its field."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from trio_llm.errors import InvalidRequestError
from trio_llm.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)

HUGE = 10**5000
NOT_NUMBERS: list[Any] = ["1", True, None, [1], math.nan, math.inf, -math.inf, HUGE, -HUGE]
NOT_INTEGERS: list[Any] = ["1", True, 1.0, 1.5, [1], math.nan, HUGE, -HUGE]

WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in [*NOT_NUMBERS, -0.1, 2.1, 2**70]],
    *[("top_p", value) for value in [*NOT_NUMBERS, 0, -0.1, 1.1]],
    *[("top_k", value) for value in [*NOT_INTEGERS, None, -2, 2**63]],
    *[("seed", value) for value in [*NOT_INTEGERS, 2**63, -(2**63) - 1, 18446744073709551616]],
    *[("max_tokens", value) for value in [*NOT_INTEGERS, 0, -1, 2**63]],
    *[("min_tokens", value) for value in [*NOT_INTEGERS, None, -1, 2**63]],
    *[("logprobs", value) for value in [*NOT_INTEGERS, -1, 21]],
    *[("prompt_logprobs", value) for value in [*NOT_INTEGERS, -1, 21]],
    *[
        ("allowed_token_ids", value)
        for value in [5, (), [], ["5"], [True], [-1], [2**31], [1] * (MAX_ALLOWED_TOKEN_IDS + 1)]
    ],
    *[
        ("bad_words", value)
        for value in [
            "a",
            1,
            None,
            [1],
            [""],
            ["a"] * (MAX_BAD_WORDS + 1),
            ["\udc97"],
            ["x" * (MAX_BAD_WORD_CHARS + 1)],
        ]
    ],
    *[("min_p", value) for value in [*NOT_NUMBERS, -0.1, 1.1]],
    *[
        (name, value)
        for name in ("presence_penalty", "frequency_penalty")
        for value in [*NOT_NUMBERS, MAX_PENALTY + 0.1, -MAX_PENALTY - 0.1]
    ],
    *[("repetition_penalty", value) for value in [*NOT_NUMBERS, 0, -1, -sys.float_info.max]],
    *[
        ("logit_bias", value)
        for value in [
            None,
            5,
            [(1, 1.0)],
            {"1": 1.0},
            {True: 1.0},
            {-1: 1.0},
            {2**31: 1.0},
            *[{1: value} for value in [*NOT_NUMBERS, MAX_LOGIT_BIAS + 1, -MAX_LOGIT_BIAS - 1]],
            dict.fromkeys(range(MAX_LOGIT_BIAS_TOKENS + 1), 1.0),
        ]
    ],
    *[("n", value) for value in [*NOT_INTEGERS, -1, 0, 129, 2**64]],
    *[("stop", value) for value in [1, [1], [""], "", ["a"] * (MAX_STOP_STRINGS + 1), ["\udc97"], ["x" * 1025]]],
    *[
        ("stop_token_ids", value)
        for value in [5, ["5"], [True], [-1], [2**31], [2**63], [1] * (MAX_STOP_TOKEN_IDS + 1)]
    ],
    *[
        (name, value)
        for name in (
            "ignore_eos",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "spaces_between_special_tokens",
        )
        for value in (1, "true")
    ],
    ("output_kind", 7),
]


def short_name(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(map(short_name, [*value.items()][:1]))
    if isinstance(value, tuple):
        return "-".join(map(short_name, value))
    return "huge" if isinstance(value, int) and abs(value) > 2**70 else ascii(value)[:30]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=short_name)
def test_a_wrong_value_is_refused_and_its_field_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{field: value})

    assert refused.value.param == field
    refused.value.args[0].encode()  # whatever was given, the message is text that can be sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2**63 - 1),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("stop", ["a"] * MAX_STOP_STRINGS),
        ("n", 1),
        ("n", 128),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
        ("allowed_token_ids", [1] * MAX_ALLOWED_TOKEN_IDS),
        ("bad_words", ["x" * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", MAX_PENALTY),
        ("frequency_penalty", -MAX_PENALTY),
        ("repetition_penalty", 100),
        ("repetition_penalty", sys.float_info.max),
        ("repetition_penalty", sys.float_info.min),
        ("logit_bias", {2**31 - 1: MAX_LOGIT_BIAS, 0: -MAX_LOGIT_BIAS}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS_TOKENS), 1)),
    ],
)
def test_a_value_at_the_edge_is_accepted(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(min_tokens=5, max_tokens=4)

    assert refused.value.param == "min_tokens"


def test_a_tiny_temperature_counts_as_one_hundredth() -> None:
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_a_number_among_strings_is_not_called_a_length(field: str) -> None:
    fields: dict[str, Any] = {field: ["a", 3]}

    with pytest.raises(InvalidRequestError, match=f"each of {field} must be a string of 1 to .* characters, not 3"):
        SamplingParams(**fields)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]


def test_a_tiny_repetition_penalty_counts_as_the_least() -> None:
    assert SamplingParams(repetition_penalty=1e-9).repetition_penalty == MIN_REPETITION_PENALTY


def test_a_huge_repetition_penalty_counts_as_the_largest_and_100_as_itself() -> None:
    assert SamplingParams(repetition_penalty=1e300).repetition_penalty == MAX_REPETITION_PENALTY
    assert SamplingParams(repetition_penalty=100).repetition_penalty == 100


@pytest.mark.parametrize("penalty", [0, -1, math.nan, math.inf])
def test_a_refused_repetition_penalty_is_outside_of_the_range_that_the_message_states(penalty: float) -> None:
    with pytest.raises(InvalidRequestError, match="must be a finite number above 0, not"):
        SamplingParams(repetition_penalty=penalty)


def test_top_k_minus_1_is_no_limit() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def test_a_bias_that_its_maker_changes_later_is_the_old_one() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 99.0

    assert params.logit_bias == {1: 2.0}
