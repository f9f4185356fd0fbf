"""What the machine lets us use, read from files that tests write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trio_llm.engine.worker.system_limits import available_memory_bytes, usable_cpus

MEMINFO = "MemTotal:  2000 kB\nMemAvailable:   1000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 1000 * 1024),
        ({"memory.max": "600000", "memory.current": "200000"}, 400_000),
        ({"memory.max": "600000", "memory.current": "200000", "memory.stat": "anon 1\ninactive_file 50000\n"}, 450_000),
        ({"memory.max": "600000", "memory.current": "700000"}, 0),
        ({"memory.max": "99999999999", "memory.current": "0"}, 1000 * 1024),
    ],
)
def test_available_memory_is_the_least_of_machine_and_container(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    assert available_memory_bytes(meminfo=tmp_path / "meminfo", cgroup=tmp_path) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),  # None: as many as the mask allows
    [
        ("100000 100000", 1),
        ("20000 100000", 1),
        ("max 100000", None),
        ("100000000 100000", None),
        (None, None),
        ("?", None),
    ],
)
def test_usable_processors_are_the_fewest_of_mask_and_quota(
    quota: str | None, expected: int | None, tmp_path: Path
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)

    assert usable_cpus(cgroup=tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_this_machine_has_memory_and_processors() -> None:
    assert available_memory_bytes() > 0
    assert usable_cpus() >= 1
