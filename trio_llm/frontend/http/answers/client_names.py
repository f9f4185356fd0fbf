"""Errors in the client's words, where a protocol has other names for our fields.

Pure. Used by generations and by the protocols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from trio_llm.errors import InvalidRequestError

__all__ = ["in_client_names"]

_QUOTED: Final = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
"""What a client sent, as messages show it: its words stay as they are."""


def in_client_names(
    error: InvalidRequestError, names: Mapping[str, str], *, prompt: str = "prompt"
) -> InvalidRequestError:
    """`error` with the client's names of fields in its text and in `param`.

    Args:
        names: field of ours -> what the client calls it. Only those that differ.
        prompt: the client's field that the prompt comes from, for `param`. The text says "the prompt" all the same.
    """
    if error.param == "prompt" and prompt != "prompt":
        error = InvalidRequestError(str(error), prompt)
    if not names:
        return error
    parts = _QUOTED.split(str(error))
    for ours, theirs in names.items():
        parts[::2] = [re.sub(rf"\b{ours}\b", theirs, part) for part in parts[::2]]
    return InvalidRequestError("".join(parts), names.get(error.param or "", error.param))
