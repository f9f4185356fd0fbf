"""PoolingParams and PoolingOutput: every wrong value names its field, and bytes are the numbers they stand for."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.errors import InvalidRequestError
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams

NOT_TASKS: list[Any] = ["score", "", "Embed", None, 1, 10**5000, True, ["embed"], "\udc97"]
NOT_KINDS: list[Any] = ["first", "", 1, True, ["mean"], "x" * 10_000]
NOT_BOOLS: list[Any] = [1, 0, None, "true", []]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"task": value}, "task") for value in NOT_TASKS],
        *[({"pooling": value}, "pooling") for value in NOT_KINDS],
        *[({"normalize": value}, "normalize") for value in NOT_BOOLS],
        ({"task": "classify", "pooling": "mean"}, "pooling"),
        ({"task": "classify", "normalize": False}, "normalize"),
    ],
)
def test_a_wrong_value_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PoolingParams(**fields)

    assert caught.value.param == param
    assert len(str(caught.value)) < 400


def test_a_model_s_own_way_is_that_of_the_last_token() -> None:
    assert not PoolingParams().is_mean
    assert not PoolingParams(pooling="last").is_mean
    assert PoolingParams(pooling="mean").is_mean
    assert PoolingParams(task="classify", pooling="last") != PoolingParams(pooling="last")


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_the_values_of_an_output_are_those_that_its_bytes_hold(numbers: list[float]) -> None:
    output = PoolingOutput("r", 1, 0, b"".join(struct.pack("<f", number) for number in numbers))

    assert output.values == numbers
