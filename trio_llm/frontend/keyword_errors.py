"""Errors for fields of `SamplingParams` that are given to a call which takes the object.

Pure. Used by the calls that give blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from trio_llm.quoting import quote
from trio_llm.sampling import SamplingParams

__all__ = ["make_keyword_error"]


def make_keyword_error(call: str, first: str, unknown: Mapping[str, object]) -> TypeError:
    """The error for keywords that `call` does not have.

    Args:
        first: name of the call's first argument.
        unknown: the keywords with their values, at least one.
    """
    name, value = next(iter(unknown.items()))
    text = f"{call}() got an unexpected keyword argument {name!r}"
    if name in SamplingParams.__struct_fields__:
        text += f"; it is a field of SamplingParams: {call}({first}, SamplingParams({name}={quote(value)}))"
    return TypeError(text)
