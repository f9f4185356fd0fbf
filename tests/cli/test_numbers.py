"""Numbers on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.cli.numbers import parse_count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("0.5K", 512),
        ("512M", 512 * 1024**2),
        ("2G", 2 * 1024**3),
        ("2GiB", 2 * 1024**3),
        ("3g", 3_000_000_000),
        (" 8k ", 8000),
    ],
)
def test_a_suffix_multiplies(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1kb", "1 2", "0x10", "1e3", "1.5", "1.2345k", "∞", "1_000", "k1"])
def test_what_is_no_whole_number_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a") as refused:
        parse_count(text)

    assert repr(text) in str(refused.value)


@given(st.integers(min_value=0, max_value=10**18))
def test_a_plain_number_means_itself(number: int) -> None:
    assert parse_count(str(number)) == parse_count(number) == number
