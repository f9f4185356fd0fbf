"""Pydantic's errors about a body, as one error of ours.

Pure. Used where bodies are parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import MAX_QUOTED_CHARS, quote

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo

__all__ = ["invalid_fields_error"]

MAX_PROBLEMS: Final = 10


def invalid_fields_error(error: ValidationError, known: Mapping[str, FieldInfo]) -> InvalidRequestError:
    """All problems as one error: its text lists at most ten, `param` names the first field.

    Args:
        known: the fields that the body may have.
    """
    problems = error.errors(include_url=False, include_context=False)
    lines = [_problem(problem, known) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return InvalidRequestError("; ".join(lines), _path(problems[0]["loc"]) or None)


def _problem(problem: Any, known: Mapping[str, FieldInfo]) -> str:
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        return f"{path} is missing"
    if problem["type"] == "extra_forbidden":
        return f"there is no field {quote(path)} here; there are {', '.join(sorted(known))}"
    if path in known and (range_ := _range(problem["type"], known[path].json_schema_extra)):
        return f"{path} must be {range_}, not {quote(problem['input'])}"
    return f"{path}: {problem['msg']}, not {quote(problem['input'])}"


def _range(problem: str, bounds: Any) -> str | None:
    """What a number must be, in the words of `SamplingParams`; None: the problem is another one.

    Args:
        bounds: of the field, as JSON Schema has them.
    """
    if not problem.startswith(("int_", "float_")) or not isinstance(bounds, dict):
        return None
    kind = "an integer" if problem.startswith("int_") else "a number"
    least, above, most = (bounds.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    if above is None:
        return None
    return f"{kind} above {above}" if most is None else f"{kind} above {above} and up to {most}"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:MAX_QUOTED_CHARS] for part in location)
