"""Profiler: torch's profiler as something to start and to stop, with a trace for Chrome or Perfetto as the result.

Used by the torch executor, from the engine's one thread: torch's profiler must end where it began.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import torch

__all__ = ["Profiler"]


class Profiler:
    """At most one recording at a time. A recording is kept in memory until it ends: megabytes a step."""

    def __init__(self, *, on_cuda: bool) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._activities = activities
        self._recording: torch.profiler.profile | None = None
        self._folder = Path()
        self._numbers = count(1)

    def start(self, folder: Path) -> None:
        """Begin, if nothing is being recorded. The folder is made if it is not there.

        Raises:
            OSError: it cannot be made.
        """
        if self._recording is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        recording = torch.profiler.profile(activities=self._activities)
        recording.start()
        self._recording, self._folder = recording, folder

    def stop(self) -> str | None:
        """End, write the trace and return its path; None if nothing was being recorded.

        Raises:
            OSError: it cannot be written; it is lost.
        """
        if self._recording is None:
            return None
        recording, self._recording = self._recording, None
        recording.stop()
        path = self._folder / f"trace-{os.getpid()}-{next(self._numbers)}.json"
        recording.export_chrome_trace(str(path))
        return str(path)
