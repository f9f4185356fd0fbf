"""Quoting: how error messages show a value that a client has sent.

Pure. Used where requests are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["MAX_QUOTED_CHARS", "quote"]

MAX_QUOTED_CHARS: Final = 200


def quote(value: object) -> str:
    """A value as short ASCII text. Safe for any value: it encodes nothing, and reads a bounded part."""
    if isinstance(value, str):
        text = ascii(value[:MAX_QUOTED_CHARS])
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        text = "a number of more than 77 digits"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, int | float):
        text = str(value)
    elif isinstance(value, list | tuple):
        text = f"a list of {len(value)}"
    elif isinstance(value, Mapping):
        text = f"an object with {len(value)} keys"
    else:
        text = f"a {type(value).__name__}"
    return text[:MAX_QUOTED_CHARS]
