"""Requests whose parameters leave no token are refused, and no others: against the rule by which the engine bans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.engine.sampling.logits_processors.bans import banned_tokens
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.requests.tokens_left import check_tokens_left
from trio_llm.sampling import SamplingParams

WIDTH = 6
EOS = (0, 2)

ids = st.integers(0, WIDTH - 1)


def check(
    *,
    bad_words: list[list[int]] | None = None,
    prompt: list[int] | None = None,
    eos_token_ids: tuple[int, ...] = EOS,
    **fields: Any,
) -> None:
    params = SamplingParams(**fields)
    check_tokens_left(params, bad_words or [], prompt or [1], eos_token_ids=eos_token_ids, width=WIDTH)


@given(
    prompt=st.lists(ids, min_size=1, max_size=4),
    allowed=st.none() | st.lists(ids, min_size=1, max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=6),
    stop_token_ids=st.lists(ids, max_size=6),
    min_tokens=st.integers(0, 2),
    ignore_eos=st.booleans(),
    eos=st.lists(ids, max_size=2),
)
def test_a_request_is_refused_exactly_if_the_engine_would_have_no_first_token_for_it(
    prompt: list[int],
    allowed: list[int] | None,
    bad_words: list[list[int]],
    stop_token_ids: list[int],
    min_tokens: int,
    ignore_eos: bool,
    eos: list[int],
) -> None:
    params = SamplingParams(
        allowed_token_ids=None if allowed is None else tuple(allowed),
        stop_token_ids=tuple(stop_token_ids),
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
    )
    sequence = Sequence(
        request_id="a", token_ids=prompt, num_prompt_tokens=len(prompt), params=params, bad_words=bad_words
    )
    is_hopeless = set(range(WIDTH) if allowed is None else allowed) <= banned_tokens(sequence, eos)

    try:
        check_tokens_left(params, bad_words, prompt, eos_token_ids=eos, width=WIDTH)
        is_refused = False
    except InvalidRequestError:
        is_refused = True

    assert is_refused == is_hopeless


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [2], "min_tokens": 4}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": [2, 0], "min_tokens": 4}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": [3, 4], "bad_words": [[3], [4]]}, "allowed_token_ids and bad_words"),
        (
            {"allowed_token_ids": [3, 4], "bad_words": [[3], [5, 1, 4]], "prompt": [5, 1]},
            "allowed_token_ids and bad_words",
        ),
        (
            {"allowed_token_ids": [3], "min_tokens": 1, "stop_token_ids": [3]},
            "allowed_token_ids and min_tokens and stop_token_ids",
        ),
        (
            {"allowed_token_ids": [2], "min_tokens": 1, "stop_token_ids": [2], "ignore_eos": True},
            "allowed_token_ids and min_tokens and stop_token_ids",
        ),
        (
            {"allowed_token_ids": [2, 3, 4], "min_tokens": 1, "stop_token_ids": [3], "bad_words": [[4]]},
            "allowed_token_ids and min_tokens and stop_token_ids and bad_words",
        ),
        ({"min_tokens": 1, "stop_token_ids": [1, 3, 4, 5]}, "min_tokens and stop_token_ids"),
        ({"bad_words": [[i] for i in range(WIDTH)]}, "bad_words"),
    ],
)
def test_the_error_names_the_parameters_that_have_a_part_in_it(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{names} together leave no token") as refused:
        check(**fields)

    assert refused.value.param == names.split(" ")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2, 3], "min_tokens": 4},
        {"allowed_token_ids": [2], "min_tokens": 4, "ignore_eos": True},
        {"allowed_token_ids": [2], "min_tokens": 4, "eos_token_ids": ()},
        {"allowed_token_ids": [3], "bad_words": [[3, 3]]},
        {"allowed_token_ids": [3], "logit_bias": {3: -100}},
        {"stop_token_ids": [1, 3, 4, 5]},
        {"min_tokens": 4, "bad_words": [[1], [3], [4]]},
    ],
)
def test_a_request_with_a_token_left_is_accepted(fields: dict[str, Any]) -> None:
    check(**fields)
