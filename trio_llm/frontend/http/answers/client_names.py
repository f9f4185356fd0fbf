"""Errors in the client's words, where a protocol has other names for our fields.

Pure. Used by generations and by the protocols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trio_llm.errors import InvalidRequestError

__all__ = ["in_client_names"]


def in_client_names(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """`error` with the client's names of fields in its text and in `param`.

    Args:
        names: field of ours -> what the client calls it. Only those that differ.
    """
    if not names:
        return error
    text = str(error)
    for ours, theirs in names.items():
        text = re.sub(rf"\b{ours}\b", theirs, text)
    return InvalidRequestError(text, names.get(error.param or "", error.param))
