"""Numbers as people write them on a command line: 512M, 2G, 1k, 25.6k.

Pure. Used by the options of `trio-llm`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

__all__ = ["parse_count"]

_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])|([KMGT])(?:iB)?)?")
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_count(text: str | int) -> int:
    """A whole number with an optional suffix.

    Small letters count in thousands (1k is 1000), capitals in powers of 1024 (1K and 1KiB are 1024), so that
    `--max-model-len 8k` and `--kv-cache-memory 2G` both mean what their readers expect.

    Args:
        text: what the user wrote. An int is returned as it is: a default comes through here as well.

    Raises:
        ValueError: it is not such a number, it is negative, or it is not whole.
    """
    if isinstance(text, int):
        return text
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number; write it like 4096, 8k, 512M or 2G")
    digits, decimal, binary = match.groups()
    factor = 1000 ** _POWERS[decimal] if decimal else 1024 ** _POWERS[binary.lower()] if binary else 1
    # Decimal, since 25.6 * 1000 is not whole in binary floating point.
    value = Decimal(digits) * factor
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
