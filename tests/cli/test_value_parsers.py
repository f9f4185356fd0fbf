"""Numbers on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.cli.value_parsers import parse_count, parse_decimal, parse_port, parse_temperature


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


@pytest.mark.parametrize("text", ["", "k", "1kb", "1 2", "0x10", "1e3", "1.5", "1.2345k", "∞", "1_000", "k1"])
def test_what_is_no_whole_number_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a") as refused:
        parse_count(text)

    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("-1", "is negative"), ("-8k", "is negative"), ("9999999T", "too large"), (str(2**63), "too large")],
)
def test_a_number_out_of_range_has_another_message_than_text_that_is_no_number(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_count(text)

    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["", "http", "-1", "8k", "80.0", "٣", "1" * 5000])
def test_a_port_is_digits_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="is not a port"):
        parse_port(text)

    assert parse_port("8000") == parse_port(8000) == 8000


@pytest.mark.parametrize("text", ["", "soon", "1,5", "30 s"])
def test_seconds_are_a_number_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number; write it like"):
        parse_decimal(text)

    assert parse_decimal("2.5") == parse_decimal(2.5) == 2.5


@pytest.mark.parametrize("text", ["-0.1", "2.01", "nan", "inf"])
def test_a_temperature_is_from_0_to_2(text: str) -> None:
    with pytest.raises(ValueError, match="from 0 to 2, not"):
        parse_temperature(text)

    assert [parse_temperature("0"), parse_temperature("2")] == [0, 2]


@given(st.integers(min_value=0, max_value=10**18))
def test_a_plain_number_means_itself(number: int) -> None:
    assert parse_count(str(number)) == parse_count(number) == number
