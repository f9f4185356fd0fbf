"""JSON bodies: bytes become an object. Bodies that are not JSON, or would hold up the process, are refused.

Pure. Used by the request reader. NaN, infinities, bytes that are not UTF-8, lone surrogates, deep nesting and huge
numbers are refused here, once, and not where they would surface.

No parser releases the interpreter lock while it works, so a thread alone does not help: every stream of the process
waits. The time goes into the values that a parser makes, not into bytes: 16 MiB of text take a few milliseconds, but 5
million empty lists two seconds. Therefore the values of a big body are counted first.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import msgspec

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import quote

__all__ = ["BIG_BODY_BYTES", "MAX_CONTAINERS", "MAX_DIGITS", "MAX_ITEMS", "MAX_STRINGS", "parse_json_object"]

BIG_BODY_BYTES: Final = 64 * 1024
"""A body up to this size is read within a few milliseconds, whatever is in it."""
MAX_ITEMS: Final = 1024 * 1024
"""Members of all lists and objects together, roughly. Token ids are the ones that come in such numbers."""
MAX_CONTAINERS: Final = 64 * 1024
"""Lists and objects."""
MAX_STRINGS: Final = 256 * 1024
"""Strings, keys included."""
MAX_DIGITS: Final = 400
"""Digits of one number. The time to read a long one grows with the square of its length."""

_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)


def parse_json_object(body: bytes, content_type: str | None) -> dict[str, Any]:
    """The JSON object in `body`.

    Args:
        content_type: the header. A body without the header is taken for JSON.

    Raises:
        InvalidRequestError: not JSON, or not an object, or one of too many values. `param` names a field that holds
            a number like NaN, unless the body is big.
    """
    if content_type is not None and not _is_json(content_type):
        raise InvalidRequestError(
            f"the content type must be application/json, not {quote(content_type)}; "
            "say so in the header content-type (with curl: -H 'content-type: application/json')"
        )
    if not body.strip():
        raise InvalidRequestError("the body is empty; send a JSON object")
    is_big = len(body) > BIG_BODY_BYTES
    if is_big:
        _check_counts(body)
    value, problem = _decode(body)
    if problem is not None:
        path = None if is_big else _path_of_non_finite(body)
        if path is not None:
            raise InvalidRequestError(f"{path or 'the body'}: NaN and infinite numbers are not allowed", path)
        raise InvalidRequestError(f"the body is not valid JSON in UTF-8: {problem}")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {quote(value)}")
    return value


def _decode(body: bytes) -> tuple[Any, str | None]:
    """The value in `body`, or what is wrong with it.

    The parser's error does not leave this function: it would be the context of the one that is raised (`from None` only
    hides it), and holds the body. So it is wherever bodies are read; `tests/frontend/http/server/test_memory.py`.
    """
    try:
        return msgspec.json.decode(body), None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, str(error)


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


# ------------------------------------------------------------------------------------------- counting


def _check_counts(body: bytes) -> None:
    """Refuse what would take long to read. Exact for JSON, and linear: a handful of passes in C.

    Raises:
        InvalidRequestError: a limit is passed.
    """
    if b'\\"' in body:
        # Pairs first, so that the backslash that is left before a quotation mark does escape it.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = body.split(b'"', 2 * MAX_STRINGS + 1)
    if len(pieces) > 2 * MAX_STRINGS + 1:
        raise _too_many("strings", MAX_STRINGS)
    outside = b"".join(pieces[::2])  # every second piece is the inside of a string
    if outside.count(b",") > MAX_ITEMS:
        raise _too_many("values", MAX_ITEMS)
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise _too_many("lists and objects", MAX_CONTAINERS)
    if b"0" * (MAX_DIGITS + 1) in outside.translate(_DIGITS_TO_ZERO):
        raise InvalidRequestError(f"the body has a number of more than {MAX_DIGITS} digits, the limit of this server")


def _too_many(what: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body has more than {limit} {what}, the limit of this server; send less at once")


# ------------------------------------------------------------------------------------- numbers like NaN


def _path_of_non_finite(body: bytes) -> str | None:
    """The path of a NaN or an infinite number in a small body that was refused. None if it has no such number."""
    try:
        value = json.loads(body)  # which takes them
    except (ValueError, RecursionError):
        return None
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, one = todo.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return ".".join(path)
        if isinstance(one, dict):
            todo.extend(((*path, key), member) for key, member in one.items())
        elif isinstance(one, list):
            todo.extend(((*path, str(index)), member) for index, member in enumerate(one))
    return None
