"""JSON bodies: bytes to an object, refusing what JSON does not have.

Pure. Used by every route that takes a body. NaN, infinities, bytes that are not UTF-8, lone surrogates, deep
nesting and huge numbers are refused here, once, and not where they would surface.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.errors import quote

__all__ = ["parse_json_object"]

# 1e999 is good JSON, and infinite. Looking at every number of a big body is slow: only if one may be that large.
_MAY_OVERFLOW = re.compile(rb"\d[eE]\+?\d{3}|\d{200}")


def parse_json_object(body: bytes, content_type: str | None) -> dict[str, Any]:
    """The JSON object in `body`.

    Args:
        content_type: the header; None, if there was none, is taken for JSON.

    Raises:
        InvalidRequestError: not JSON, or not an object; `param` names a field that holds a number like NaN.
    """
    if content_type is not None and not _is_json(content_type):
        raise InvalidRequestError(f"the content type must be application/json, not {quote(content_type)}")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(body, error) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {quote(value)}")
    if _MAY_OVERFLOW.search(body) and (path := _path_of_non_finite(value)) is not None:
        raise _non_finite(path)
    return value


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _not_json(body: bytes, error: ValueError) -> InvalidRequestError:
    """Why `body` is refused. If only because of NaN or an infinity, the field that holds it is named."""
    try:
        value = from_json(body, allow_inf_nan=True)
    except ValueError:
        return InvalidRequestError(f"the body is not valid JSON in UTF-8: {error}")
    path = _path_of_non_finite(value)
    return InvalidRequestError(f"the body is not valid JSON: {error}") if path is None else _non_finite(path)


def _non_finite(path: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path or 'the body'}: NaN and infinite numbers are not allowed", path or None)


def _path_of_non_finite(value: Any) -> str | None:
    for path, leaf in _numbers(value, ()):
        if not math.isfinite(leaf):
            return ".".join(path)
    return None


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every float in `value`. The parser has bounded the depth."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _numbers(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            if not isinstance(member, int | str):  # most long lists are token ids
                yield from _numbers(member, (*path, str(index)))
