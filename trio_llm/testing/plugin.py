"""The pytest plugin: fixtures `fake_llm` and `fake_llm_server`, for pytest-trio.

pytest loads it at its start in every environment that has trio_llm, so it loads nothing that is not there already.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trio_llm.testing.fake_llm import FakeLLM

__all__ = ["fake_llm", "fake_llm_server"]

if importlib.util.find_spec("pytest_trio") is not None:
    from pytest_trio import trio_fixture  # type: ignore[import-untyped] # a plugin, too: it is loaded in any case

    @trio_fixture  # type: ignore[untyped-decorator]
    async def fake_llm() -> AsyncIterator[FakeLLM]:
        """A FakeLLM of its own for each test. Set `answers`, `answer` or `slow()` in the test."""
        from trio_llm.testing.fake_llm import open_fake_llm

        async with open_fake_llm() as llm:
            yield llm

    @trio_fixture  # type: ignore[untyped-decorator]
    async def fake_llm_server(fake_llm: FakeLLM) -> AsyncIterator[str]:
        """The URL of a real server on loopback for the test's `fake_llm`. Not with `autojump_clock`."""
        from trio_llm.testing.server import open_test_server

        async with open_test_server(fake_llm) as url:
            yield url

else:

    @pytest.fixture
    def fake_llm() -> None:
        pytest.fail("the fixture fake_llm needs pytest-trio: pip install pytest-trio")

    @pytest.fixture
    def fake_llm_server() -> None:
        pytest.fail("the fixture fake_llm_server needs pytest-trio: pip install pytest-trio")
