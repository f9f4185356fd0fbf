"""Pieces of JSON Schema that pydantic cannot derive, since our own code checks those values.

Pure. Used by the request models. A test compares the verdict of the schemas with that of the server.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from trio_llm.frontend.rendering.messages import MAX_MESSAGES, MAX_PARTS, ROLES, TEXT_FIELDS, UNSUPPORTED_FIELDS

__all__ = [
    "INT64_MAX",
    "INT64_MIN",
    "MESSAGES",
    "NON_EMPTY",
    "TOKEN_ID",
    "Schema",
    "bounded",
    "implies",
    "one_or_many",
    "prompt_schema",
]

Schema = dict[str, Any]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
NON_EMPTY: Final[Schema] = {"type": "string", "minLength": 1}
TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def bounded(least: float | None = None, most: float | None = None, *, above: float | None = None) -> Any:
    """A field with these bounds in the document. It does not check them."""
    bounds = {"minimum": least, "maximum": most, "exclusiveMinimum": above}
    return Field(json_schema_extra={name: bound for name, bound in bounds.items() if bound is not None})


def implies(name: str, value: Schema, other: str, needed: Schema, *, is_needed: bool = True) -> Schema:
    """If the field `name` is there with a value like this, the field `other` must be like that.

    Args:
        is_needed: `other` must be there, too.
    """
    then: Schema = {"properties": {other: needed}}
    if is_needed:
        then["required"] = [other]
    return {"if": {"properties": {name: value}, "required": [name]}, "then": then}


def one_or_many(item: Schema, most: int) -> Schema:
    """One of these, or a list of 1 to `most` of them."""
    return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1, "maxItems": most}]}


def prompt_schema(most: int) -> Schema:
    """A string, a list of token ids, or 1 to `most` of either."""
    ids: Schema = {"type": "array", "items": TOKEN_ID, "minItems": 1}
    return {"anyOf": [one_or_many(NON_EMPTY, most), one_or_many(ids, most)]}


# ------------------------------------------------------------------------------------------ messages

_TEXT_PART: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT: Final[Schema] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TEXT_PART]}, "maxItems": MAX_PARTS},
    ]
}
_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": {"enum": sorted(ROLES)},
        "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
        **{name: {"type": ["string", "null"]} for name in TEXT_FIELDS},
        **{name: {"enum": [None, False, 0, "", [], {}]} for name in UNSUPPORTED_FIELDS},
    },
    "required": ["role"],
    "if": {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
    "else": {"properties": {"content": _CONTENT}, "required": ["content"]},
}

MESSAGES: Final[Schema] = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}
