"""The public names of the package."""

from __future__ import annotations

import pytest

import trio_llm
from trio_llm import _HOMES, errors


def test_every_public_name_is_there() -> None:
    for name in trio_llm.__all__:
        assert getattr(trio_llm, name) is not None
    assert set(_HOMES) | {"__version__"} == set(trio_llm.__all__)


def test_every_error_is_public() -> None:
    classes = {name: value for name in errors.__all__ if isinstance(value := getattr(errors, name), type)}

    assert "EngineDeadError" in classes
    assert {name: getattr(trio_llm, name) for name in classes if name in trio_llm.__all__} == classes


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        trio_llm.no_such_name  # noqa: B018
