"""Errors about fields of a body, in the names that the client used.

Pure. Used by the request models and by the routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import MAX_QUOTED_CHARS, quote

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["invalid_fields_error", "name_as_asked"]

MAX_PROBLEMS: Final = 10


def invalid_fields_error(error: ValidationError) -> InvalidRequestError:
    """What pydantic found, as one error that lists at most ten problems and names the first field."""
    problems = error.errors(include_url=False, include_context=False)
    lines = [_problem(problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return InvalidRequestError("; ".join(lines), _path(problems[0]["loc"]) or None)


def name_as_asked(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error as the client understands it: `names` has what it calls our fields, where that is something else."""
    if not names:
        return error
    text = str(error)
    for ours, theirs in names.items():
        text = re.sub(rf"\b{ours}\b", theirs, text)
    return InvalidRequestError(text, names.get(error.param or "", error.param))


def _problem(problem: Any) -> str:
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        return f"{path} is missing"
    return f"{path}: {problem['msg']}, not {quote(problem['input'])}"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:MAX_QUOTED_CHARS] for part in location)
