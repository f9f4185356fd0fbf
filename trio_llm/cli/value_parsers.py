"""Numbers as people write them on a command line: 512M, 2G, 1k, 25.6k, and seconds, ports and temperatures.

Pure. Used by the options of `trio-llm`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

__all__ = ["parse_count", "parse_decimal", "parse_port", "parse_temperature"]

_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])|([KMGT])(?:iB)?)?")
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}
_MAX_COUNT: Final = 2**63 - 1
"""The largest number in a message to the engine."""


def parse_count(text: str | int) -> int:
    """A whole number with an optional suffix.

    Small letters count in thousands (1k is 1000), capitals in powers of 1024 (1K and 1KiB are 1024), so that
    `--max-model-len 8k` and `--kv-cache-memory 2G` both mean what their readers expect.

    Args:
        text: what the user wrote. An int is returned as it is: a default comes through here as well.

    Raises:
        ValueError: it is not such a number, it is negative, it is not whole, or it has more than 63 bits.
    """
    if isinstance(text, int):
        return text
    if text.strip().startswith("-"):
        raise ValueError(f"{text!r} is negative; write a number like 4096, 8k, 512M or 2G")
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number; write it like 4096, 8k, 512M or 2G")
    digits, decimal, binary = match.groups()
    factor = 1000 ** _POWERS[decimal] if decimal else 1024 ** _POWERS[binary.lower()] if binary else 1
    # Decimal, since 25.6 * 1000 is not whole in binary floating point.
    value = Decimal(digits) * factor
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    if value > _MAX_COUNT:
        raise ValueError(f"{text!r} is too large; the limit is {_MAX_COUNT}")
    return int(value)


def parse_port(text: str | int) -> int:
    """A port number; whether there can be such a port is for the config to say.

    Raises:
        ValueError: it is not made of digits.
    """
    if isinstance(text, int):
        return text
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is None:
        raise ValueError(f"{text!r} is not a port; write a number from 0 to 65535, like 8000")
    return int(text)


def parse_decimal(text: str | float) -> float:
    """A number with or without a fraction; its range is for the config to say.

    Raises:
        ValueError: it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; write it like 30 or 2.5") from None


def parse_temperature(text: str | float) -> float:
    """
    Raises:
        ValueError: it is no number from 0 to 2.
    """
    value = parse_decimal(text)
    if not 0 <= value <= 2:
        raise ValueError(f"a temperature is a number from 0 to 2, not {text}")
    return value
