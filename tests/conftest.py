"""For all tests: the count of engine processes at the end of a run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.end_to_end.servers import ENGINE_COUNT, FAKE_ENGINE_COUNT

MAX_ENGINES = 6
"""With torch and a model. Each takes seconds to start: tests share them, and recovery is shown with fake ones."""
MAX_FAKE_ENGINES = 120
"""With a fake device, ready after a third of a second. The death matrix needs two for each death of an engine and one
for each death of a front end; restarts count."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("engine processes")
    terminalreporter.line(f"engine processes started: {len(ENGINE_COUNT)} (at most {MAX_ENGINES})")
    for purpose in ENGINE_COUNT:
        terminalreporter.line(f"  {purpose}")
    terminalreporter.line(f"fake ones started: {len(FAKE_ENGINE_COUNT)} (at most {MAX_FAKE_ENGINES})")
    for purpose, count in Counter(FAKE_ENGINE_COUNT).items():
        terminalreporter.line(f"  {count} x {purpose}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(ENGINE_COUNT) > MAX_ENGINES or len(FAKE_ENGINE_COUNT) > MAX_FAKE_ENGINES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
