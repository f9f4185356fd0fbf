"""Profiler: torch's profiler as something to start and to stop, with a trace for Chrome or Perfetto as the result.
`peak_bytes`: how much memory a piece of work takes.

Used by the torch executor and the step runner, from the engine's one thread: torch's profiler must end where it began.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate, count
from pathlib import Path

import torch

__all__ = ["Profiler", "peak_bytes"]


class Profiler:
    """At most one recording at a time. A recording is kept in memory until it ends: megabytes per step."""

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


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run something, and return the most memory that it held on the device at a time, beyond what was in use before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    # A CPU's allocator keeps no such count, but reports to the profiler.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recording:
        work()
    events = recording.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)
