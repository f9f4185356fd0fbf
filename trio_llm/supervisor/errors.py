"""Errors of control calls as plain data, and back. Pure."""

from __future__ import annotations

from typing import Final

from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    NotSupportedError,
    TrioLLMError,
)
from trio_llm.supervisor.messages import ControlAnswer, ErrorKind

__all__ = ["make_error", "make_error_answer"]

_TYPES: Final[dict[ErrorKind, type[TrioLLMError]]] = {
    "failed": EngineGenerateError,
    "invalid": InvalidRequestError,
    "unsupported": NotSupportedError,
    "unavailable": EngineUnavailableError,
    "dead": EngineDeadError,
}


def make_error_answer(call_id: int, error: TrioLLMError) -> ControlAnswer:
    """The answer to a call that failed."""
    kinds = [kind for kind, error_type in _TYPES.items() if isinstance(error, error_type)]
    param = error.param if isinstance(error, InvalidRequestError) else None
    return ControlAnswer(call_id=call_id, error=str(error), kind=kinds[0] if kinds else "failed", param=param)


def make_error(answer: ControlAnswer) -> TrioLLMError:
    """The error that such an answer stands for."""
    assert answer.error is not None
    if answer.kind == "invalid":
        return InvalidRequestError(answer.error, answer.param)
    return _TYPES[answer.kind](answer.error)
