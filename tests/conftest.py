"""For all tests: the count of engine processes at the end of a run."""

from __future__ import annotations

import pytest

from tests.end_to_end.servers import ENGINE_COUNT

MAX_ENGINES = 6
"""Each takes seconds to start: tests share them."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("engine processes")
    terminalreporter.line(f"engine processes started: {len(ENGINE_COUNT)} (at most {MAX_ENGINES})")
    for purpose in ENGINE_COUNT:
        terminalreporter.line(f"  {purpose}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(ENGINE_COUNT) > MAX_ENGINES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
