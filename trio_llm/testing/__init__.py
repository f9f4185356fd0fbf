"""Tests of programs that use trio_llm: a FakeLLM without a model, and a server for it. See docs/testing.md.

The names are loaded when first used, so that the pytest plugin costs nothing in runs that do not use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trio_llm.testing.fake_llm import FakeLLM, FakeRequest, open_fake_llm
    from trio_llm.testing.server import open_test_server

__all__ = ["FakeLLM", "FakeRequest", "open_fake_llm", "open_test_server"]

_HOMES: Final = {
    "FakeLLM": "trio_llm.testing.fake_llm",
    "FakeRequest": "trio_llm.testing.fake_llm",
    "open_fake_llm": "trio_llm.testing.fake_llm",
    "open_test_server": "trio_llm.testing.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
