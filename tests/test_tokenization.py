"""TokenizationParams: what is refused, and which tokens of a long prompt are kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.errors import InvalidRequestError
from trio_llm.tokenization import PLAIN, TokenizationParams, TruncationSide

IDS = list(range(10))
BAD_VALUES: dict[str, list[Any]] = {
    "truncate_prompt_tokens": [0, -2, 1.0, True, "1", 2**63, -(2**63)],
    "truncation_side": ["", "Left", None, 1, []],
    "add_special_tokens": [0, "yes", []],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
)
def test_a_value_that_is_none_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TokenizationParams(**{field: value})

    assert caught.value.param == field


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (None, "left", IDS),
        (3, "left", [7, 8, 9]),
        (3, "right", [0, 1, 2]),
        (10, "left", IDS),
        (20, "right", IDS),
        (-1, "left", IDS),
    ],
)
def test_a_prompt_keeps_its_last_tokens_or_its_first(limit: int | None, side: TruncationSide, kept: list[int]) -> None:
    params = TokenizationParams(truncate_prompt_tokens=limit, truncation_side=side)

    assert params.truncate(IDS, max_model_len=20, room=0) == kept


@pytest.mark.parametrize(("room", "num_kept"), [(0, 8), (1, 7), (5, 3), (8, 1), (100, 1)])
def test_minus_one_keeps_what_the_answer_leaves_room_for(room: int, num_kept: int) -> None:
    params = TokenizationParams(truncate_prompt_tokens=-1)

    assert params.truncate(IDS, max_model_len=8, room=room) == IDS[-num_kept:]


def test_more_tokens_than_the_model_takes_are_refused_and_the_error_names_the_limit() -> None:
    params = TokenizationParams(truncate_prompt_tokens=9)

    with pytest.raises(InvalidRequestError, match="maximum context length is 8") as caught:
        params.truncate(IDS, max_model_len=8, room=1)
    assert caught.value.param == "truncate_prompt_tokens"


@given(
    ids=st.lists(st.integers(0, 9), max_size=12),
    limit=st.none() | st.just(-1) | st.integers(1, 8),
    side=st.sampled_from(["left", "right"]),
    room=st.integers(0, 10),
)
def test_what_is_kept_is_one_piece_from_an_end_and_is_short_enough(
    ids: list[int], limit: int | None, side: TruncationSide, room: int
) -> None:
    params = TokenizationParams(truncate_prompt_tokens=limit, truncation_side=side)
    kept = params.truncate(ids, max_model_len=8, room=room)

    assert kept == (ids[len(ids) - len(kept) :] if side == "left" else ids[: len(kept)])
    assert len(kept) == len(ids) or len(kept) <= 8
    if limit is None:
        assert kept == ids


def test_a_conversation_has_its_special_tokens_already_unless_more_are_asked_for() -> None:
    asked = TokenizationParams(add_special_tokens=True)

    assert PLAIN.for_chat().add_special_tokens is False
    assert asked.for_chat().add_special_tokens is True
