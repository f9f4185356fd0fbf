"""The progress of the engine's start-up: a bar on a terminal, plain lines elsewhere.

Used by cli/serve.py, which passes the engine's status.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TextIO

from trio_llm.frontend.control.status import EngineStatus

__all__ = ["BarProgress", "PlainProgress", "ProgressView", "open_progress"]

_PHASES = {
    "starting": "starting the engine",
    "convert": "converting the model (once)",
    "load": "loading the model",
    "warm-up": "warming up",
    "tokenizer": "loading the tokenizer",
}


def _label(status: EngineStatus) -> str:
    phase = status.phase or "starting"
    return _PHASES.get(phase, phase)


class ProgressView(AbstractContextManager["ProgressView"], Protocol):
    """Shows a start-up inside its block; leaving the block clears the display."""

    def update(self, status: EngineStatus) -> None:
        """Show this status. Cheap when nothing has changed."""
        ...


def open_progress(stream: TextIO | None = None) -> ProgressView:
    """The view that suits `stream` (default: stderr): a bar if it is a terminal."""
    stream = sys.stderr if stream is None else stream
    return BarProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """One line when a phase begins, then one for each quarter of it, so that a log stays readable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: tuple[str | None, int] = ("", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def update(self, status: EngineStatus) -> None:
        quarter = 4 * min(status.done, status.total) // status.total if status.total else 0
        if (status.phase, quarter) == self._shown:
            return
        self._shown = (status.phase, quarter)
        done = f" {25 * quarter} %" if status.total else ""
        print(f"{_label(status)}{done} ({status.elapsed_s:.1f} s)", file=self._stream, flush=True)


class BarProgress:
    """A bar that is redrawn in place and removed at the end."""

    def __init__(self, stream: TextIO) -> None:
        # Only here: a server that is not on a terminal starts without rich.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
            auto_refresh=False,  # rich would start a thread for it; `update` comes often enough
        )
        self._task = self._progress.add_task(_PHASES["starting"], total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def update(self, status: EngineStatus) -> None:
        self._progress.update(
            self._task,
            description=_label(status),
            completed=status.done,
            total=status.total or None,
            refresh=True,
        )
