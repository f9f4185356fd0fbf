"""A conversion happens once, also if several processes want it, and never by half."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trio_llm.engine.models.convert_once import convert_once
from trio_llm.errors import EngineStartupError

WAIT_S = 30.0


class FakeConverter:
    """Writes two files; with a gate it waits between them."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.count = 0
        self.started = threading.Event()
        self.gate = gate

    def __call__(self, partial: Path) -> None:
        self.count += 1
        (partial / "first").write_text("1")
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        (partial / "second").write_text("2")


def ignore(phase: str, done: int, total: int) -> None:
    pass


def test_a_conversion_is_done_once_and_used_again(tmp_path: Path) -> None:
    target, converter = tmp_path / "models" / "m", FakeConverter()

    convert_once(target, converter, progress=ignore)
    convert_once(target, converter, progress=ignore)

    assert converter.count == 1
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]
    assert sorted(path.name for path in target.parent.iterdir()) == [".m.lock", "m"]


def test_of_two_at_once_one_converts_and_the_other_waits_and_uses_its_result(tmp_path: Path) -> None:
    target, gate = tmp_path / "m", threading.Event()
    winner, loser = FakeConverter(gate), FakeConverter()
    waiting = threading.Event()
    first = threading.Thread(target=lambda: convert_once(target, winner, progress=ignore))
    second = threading.Thread(target=lambda: convert_once(target, loser, progress=lambda *call: waiting.set()))

    first.start()
    assert winner.started.wait(WAIT_S)
    second.start()
    assert waiting.wait(WAIT_S)
    assert not target.exists(), "visible before it is complete"
    gate.set()
    first.join(WAIT_S)
    second.join(WAIT_S)

    assert (winner.count, loser.count) == (1, 0)
    assert not second.is_alive()
    assert (target / "second").read_text() == "2"


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "m"

    def fail(partial: Path) -> None:
        (partial / "first").write_text("1")
        raise EngineStartupError("no")

    with pytest.raises(EngineStartupError, match=r"^no$"):
        convert_once(target, fail, progress=ignore)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]

    convert_once(target, FakeConverter(), progress=ignore)

    assert target.is_dir()


KILLED = """
import sys
from pathlib import Path
from trio_llm.engine.models.convert_once import convert_once

def convert(partial):
    (partial / "first").write_text("1")
    print("converting", flush=True)
    sys.stdin.read()

convert_once(Path(sys.argv[1]), convert, progress=lambda *call: None)
"""


def test_a_killed_conversion_leaves_no_lock_and_its_remains_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "m"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"converting\n"
        process.kill()
    assert not target.exists()
    assert list(tmp_path.glob("*.partial")) or list(tmp_path.glob(".*.partial"))
    other = tmp_path / ".n.123.partial"
    other.mkdir()

    convert_once(target, FakeConverter(), progress=ignore)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", ".n.123.partial", "m"]


def test_a_cache_folder_that_cannot_be_made_names_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(EngineStartupError, match="TRIO_LLM_CACHE"):
        convert_once(tmp_path / "file" / "models" / "m", FakeConverter(), progress=ignore)
