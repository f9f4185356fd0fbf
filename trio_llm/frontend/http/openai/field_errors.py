"""Pydantic's errors about a body, as one error of ours.

Pure. Used where bodies are parsed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import MAX_QUOTED_CHARS, quote

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["invalid_fields_error"]

MAX_PROBLEMS: Final = 10


def invalid_fields_error(error: ValidationError, known: Collection[str]) -> InvalidRequestError:
    """All problems as one error: its text lists at most ten, `param` names the first field.

    Args:
        known: the fields that the body may have.
    """
    problems = error.errors(include_url=False, include_context=False)
    lines = [_problem(problem, known) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return InvalidRequestError("; ".join(lines), _path(problems[0]["loc"]) or None)


def _problem(problem: Any, known: Collection[str]) -> str:
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        return f"{path} is missing"
    if problem["type"] == "extra_forbidden":
        return f"there is no field {quote(path)} here; there are {', '.join(sorted(known))}"
    return f"{path}: {problem['msg']}, not {quote(problem['input'])}"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:MAX_QUOTED_CHARS] for part in location)
