"""A checker for the part of JSON Schema 2020-12 that the OpenAPI document uses.

A keyword that it does not know is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_NOTES: Final = {"title", "description", "default"}
_KINDS: Final[dict[str, Any]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def find_problems(
    value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], *, is_closed: bool = False, path: str = "$"
) -> Iterator[str]:
    """What of `value` is not as the schema says.

    Args:
        schemas: what references of the form `#/components/schemas/NAME` mean.
        is_closed: a member that an object's schema does not name is a problem, too.
    """
    for keyword, wanted in schema.items():
        if keyword in _NOTES or keyword in ("then", "else"):
            continue
        check = _CHECKS.get(keyword)
        if check is None:
            raise ValueError(f"{path}: the checker does not know the keyword {keyword!r}")
        yield from check(value, wanted, _Place(schema, schemas, is_closed, path))
    if is_closed and isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        if "additionalProperties" not in schema:
            yield from (f"{path}.{name}: no such field" for name in value if name not in known)


def is_valid(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    return next(find_problems(value, schema, schemas), None) is None


def keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Each keyword and its value anywhere in a tree."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            yield name, value
            yield from keywords(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from keywords(one)


class _Place:
    """Where a keyword stands, and what is around it."""

    def __init__(self, schema: Mapping[str, Any], schemas: Mapping[str, Any], is_closed: bool, path: str) -> None:
        self.schema = schema
        self._schemas = schemas
        self._is_closed = is_closed
        self.path = path

    def check(self, value: Any, schema: Any, part: str = "") -> Iterator[str]:
        if schema is not True:
            path = f"{self.path}{part}"
            yield from find_problems(value, schema, self._schemas, is_closed=self._is_closed, path=path)

    def is_valid(self, value: Any, schema: Any) -> bool:
        return next(self.check(value, schema), None) is None

    def named(self, reference: str) -> Any:
        return self._schemas[reference.removeprefix("#/components/schemas/")]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_type(value: Any, kind: str) -> bool:
    if kind == "number":
        return _is_number(value)
    if kind == "integer":
        return _is_number(value) and (isinstance(value, int) or value.is_integer())
    return isinstance(value, _KINDS[kind])


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _type(value: Any, kinds: str | list[str], place: _Place) -> Iterator[str]:
    if not any(_is_of_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{place.path}: {value!r:.80} is not of type {kinds}"


def _enum(value: Any, allowed: list[Any], place: _Place) -> Iterator[str]:
    if not any(_is_same(value, one) for one in allowed):
        yield f"{place.path}: {value!r:.80} is not one of {allowed}"


def _const(value: Any, wanted: Any, place: _Place) -> Iterator[str]:
    yield from _enum(value, [wanted], place)


def _reference(value: Any, name: str, place: _Place) -> Iterator[str]:
    yield from place.check(value, place.named(name))


def _any_of(value: Any, branches: list[Any], place: _Place) -> Iterator[str]:
    found = [list(place.check(value, branch)) for branch in branches]
    if all(found):
        yield from min(found, key=len)


def _all_of(value: Any, parts: list[Any], place: _Place) -> Iterator[str]:
    for part in parts:
        yield from place.check(value, part)


def _not(value: Any, unwanted: Any, place: _Place) -> Iterator[str]:
    if place.is_valid(value, unwanted):
        yield f"{place.path}: {value!r:.80} is excluded"


def _if(value: Any, condition: Any, place: _Place) -> Iterator[str]:
    branch = "then" if place.is_valid(value, condition) else "else"
    yield from place.check(value, place.schema.get(branch, True))


def _properties(value: Any, properties: Mapping[str, Any], place: _Place) -> Iterator[str]:
    if isinstance(value, dict):
        for name in properties.keys() & value.keys():
            yield from place.check(value[name], properties[name], f".{name}")


def _required(value: Any, names: list[str], place: _Place) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{place.path}.{name}: missing" for name in names if name not in value)


def _additional(value: Any, schema: Any, place: _Place) -> Iterator[str]:
    if isinstance(value, dict):
        for name in value.keys() - place.schema.get("properties", {}).keys():
            if schema is False:
                yield f"{place.path}.{name}: no such field"
            else:
                yield from place.check(value[name], schema, f".{name}")


def _property_names(value: Any, schema: Any, place: _Place) -> Iterator[str]:
    if isinstance(value, dict):
        for name in value:
            yield from place.check(name, schema, f" (the name {name!r:.40})")


def _items(value: Any, schema: Any, place: _Place) -> Iterator[str]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from place.check(one, schema, f"[{index}]")


def _pattern(value: Any, pattern: str, place: _Place) -> Iterator[str]:
    # The `$` of Python would take a line break before the end, that of ECMA-262 does not.
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield f"{place.path}: {value!r:.80} does not match {pattern}"


def _size(kind: type[str] | type[list[Any]] | type[dict[str, Any]], is_within: Any) -> Any:
    def check(value: Any, limit: Any, place: _Place) -> Iterator[str]:
        if isinstance(value, kind) and not is_within(len(value), limit):
            yield f"{place.path}: {len(value)} of a length, the limit is {limit}"

    return check


def _bound(is_within: Any) -> Any:
    def check(value: Any, limit: Any, place: _Place) -> Iterator[str]:
        if _is_number(value) and not is_within(value, limit):
            yield f"{place.path}: {value} is outside of {limit}"

    return check


_CHECKS: Final[dict[str, Any]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _reference,
    "anyOf": _any_of,
    "allOf": _all_of,
    "not": _not,
    "if": _if,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "propertyNames": _property_names,
    "items": _items,
    "pattern": _pattern,
    "minLength": _size(str, lambda size, limit: size >= limit),
    "maxLength": _size(str, lambda size, limit: size <= limit),
    "minItems": _size(list, lambda size, limit: size >= limit),
    "maxItems": _size(list, lambda size, limit: size <= limit),
    "minProperties": _size(dict, lambda size, limit: size >= limit),
    "maxProperties": _size(dict, lambda size, limit: size <= limit),
    "minimum": _bound(lambda value, limit: value >= limit),
    "maximum": _bound(lambda value, limit: value <= limit),
    "exclusiveMinimum": _bound(lambda value, limit: value > limit),
    "exclusiveMaximum": _bound(lambda value, limit: value < limit),
}
