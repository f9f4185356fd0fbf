"""EngineSockets: a private folder that goes with its front end, also if that is killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trio_llm.errors import EngineStartupError
from trio_llm.frontend.core_client.engine_sockets import EngineSockets, remove_abandoned_folders

HOUR_S = 3600.0
MAKES_SOCKETS = """
import time
from trio_llm.frontend.core_client.engine_sockets import EngineSockets
print(EngineSockets().folder, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_the_folder_is_private_and_goes_on_closing(parent: Path) -> None:
    sockets = EngineSockets()

    assert stat.S_IMODE(sockets.folder.stat().st_mode) == 0o700
    assert sockets.folder.parent == parent

    sockets.close()
    assert os.listdir(parent) == []


def test_what_a_killed_front_end_leaves_is_removed_and_what_a_living_one_has_is_not(parent: Path) -> None:
    front_end = subprocess.Popen(
        [sys.executable, "-c", MAKES_SOCKETS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(parent)},
    )
    assert front_end.stdout is not None
    folder = Path(front_end.stdout.readline().strip())
    assert folder.parent == parent
    later_s = time.time() + HOUR_S

    assert remove_abandoned_folders(parent, now_s=later_s) == []

    front_end.send_signal(signal.SIGKILL)
    front_end.wait()
    front_end.stdout.close()
    assert remove_abandoned_folders(parent) == [], "a young folder may not be locked yet"
    assert remove_abandoned_folders(parent, now_s=later_s) == [folder]
    assert os.listdir(parent) == []


async def test_a_later_start_removes_them(parent: Path) -> None:
    abandoned = parent / "trio_llm-abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))

    sockets = EngineSockets()

    assert os.listdir(parent) == [sockets.folder.name]
    sockets.close()


def test_nothing_else_is_removed(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (parent / "trio_llm-link").symlink_to(elsewhere)
    (parent / "trio_llm-file").touch()
    (parent / "another").mkdir()
    for name, files in {"models": ["config.json"], "notes": ["lock", "notes.txt"], "unlocked": ["in", "out"]}.items():
        (parent / f"trio_llm-{name}").mkdir()
        for file in files:
            (parent / f"trio_llm-{name}" / file).touch()
    others = sorted(parent.rglob("*"))

    assert remove_abandoned_folders(parent, now_s=time.time() + HOUR_S) == []
    assert sorted(parent.rglob("*")) == others
    assert (elsewhere / "kept").exists()


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(parent: Path) -> None:
    tempfile.tempdir = str(parent / "missing")

    with pytest.raises(EngineStartupError, match="TMPDIR"):
        EngineSockets()
