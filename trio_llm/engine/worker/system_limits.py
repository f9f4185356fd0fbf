"""Memory and processors that this machine, or the container around us, lets us use.

Linux. Used at start-up, to size the KV cache and the thread pool.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory_bytes", "usable_cpus"]

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes(*, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping: the machine's, or what our cgroup has left if that is less."""
    free = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")
    )
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used, but the kernel gives it up when memory is needed.
        free = min(free, max(0, limit - used + _inactive_file_bytes(cgroup)))
    return free


def usable_cpus(*, cgroup: Path = _CGROUP) -> int:
    """Processors that we may run on: those of our affinity mask, fewer if the cgroup has a quota. At least 1."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: only the mask limits us
    return cpus


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # not there, or "max"


def _inactive_file_bytes(cgroup: Path) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
