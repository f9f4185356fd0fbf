"""The display of a start-up."""

from __future__ import annotations

import io
import re

from trio_llm.cli.progress import BarProgress, PlainProgress, open_progress
from trio_llm.frontend.control.status import EngineStatus


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(phase: str | None, done: int = 0, total: int = 0) -> EngineStatus:
    return EngineStatus(state="loading", phase=phase, done=done, total=total, elapsed_s=1.5)


def test_off_a_terminal_a_phase_gets_a_line_and_so_does_every_quarter_of_it() -> None:
    log = io.StringIO()

    with open_progress(log) as view:
        view.update(loading(None))
        for done in range(101):
            view.update(loading("load", done, 100))
        view.update(loading("warm-up"))
        view.update(loading("warm-up"))

    assert log.getvalue().splitlines() == [
        "starting the engine (1.5 s)",
        "loading the model 0 % (1.5 s)",
        "loading the model 25 % (1.5 s)",
        "loading the model 50 % (1.5 s)",
        "loading the model 75 % (1.5 s)",
        "loading the model 100 % (1.5 s)",
        "warming up (1.5 s)",
    ]


def test_a_phase_without_words_of_its_own_is_shown_by_its_name() -> None:
    log = io.StringIO()

    with PlainProgress(log) as view:
        view.update(loading("compile"))

    assert log.getvalue().startswith("compile ")


def test_on_a_terminal_there_is_a_bar_with_what_is_done() -> None:
    terminal = Terminal()

    with open_progress(terminal) as view:
        assert isinstance(view, BarProgress)
        view.update(loading("convert", 1, 4))

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "converting the model" in shown
    assert "25%" in shown
