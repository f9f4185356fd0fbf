"""A command whose output is lost ends with one line and exit code 1. A server goes on."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.scripted_server import DONE, Answer, ScriptedServer, running, said
from trio_llm.cli.output import CheckedStream, LenientStream, OutputError, checked_output, make_output_lenient

COMMAND = [sys.executable, "-c", "from trio_llm.cli.main import main; main()"]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    def flush(self) -> None:
        raise BrokenPipeError


def test_what_cannot_be_written_is_dropped() -> None:
    stream = LenientStream(FullDisk())

    print("text", file=stream, flush=True)

    assert stream.write("four") == 4


def test_what_can_be_written_is() -> None:
    behind = io.StringIO()

    print("text", file=LenientStream(behind), flush=True)

    assert behind.getvalue() == "text\n"


def test_streams_that_were_closed_at_the_start_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", FullDisk())

    make_output_lenient()
    print("text", flush=True)
    print("text", file=sys.stderr, flush=True)

    assert not sys.stderr.isatty()


def test_a_checked_stream_passes_on_what_can_be_written_and_raises_for_the_rest() -> None:
    behind = io.StringIO()
    print("text", file=CheckedStream(behind), flush=True)
    assert behind.getvalue() == "text\n"

    with pytest.raises(OutputError, match="cannot write to standard output: no space left"):
        CheckedStream(FullDisk()).write("text")
    with pytest.raises(OutputError, match="closed"):
        CheckedStream(None).write("text")
    CheckedStream(None).flush()  # nothing was lost


def test_streams_are_restored_unless_they_cannot_be_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", FullDisk())

    with checked_output():
        print("text")
        print("dropped", file=sys.stderr)

    assert sys.stdout is out
    assert out.getvalue() == "text\n"
    assert sys.stderr is None


# ---------------------------------------------------------------------------------- real processes


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer(answers=[Answer([said("Hel"), said("lo"), DONE])])) as server:
        yield server


def finish(args: list[str], *, stdout: int, closes_stdout: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end. What comes from the interpreter itself is in `stderr`, too."""
    command = [*COMMAND, *args]
    if closes_stdout:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )


def unread_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("place", [full_disk, unread_pipe])
@pytest.mark.parametrize("command", ["chat", "--version", "--help", "serve --help"])
def test_a_command_whose_output_cannot_be_written_ends_with_one_line(
    command: str, place: Callable[[], int], server: ScriptedServer
) -> None:
    args = ["chat", server.url, "-q", "hi"] if command == "chat" else command.split()
    stdout = place()
    try:
        result = finish(args, stdout=stdout)
    finally:
        os.close(stdout)

    reason = os.strerror(errno.ENOSPC if place is full_disk else errno.EPIPE)
    assert (result.returncode, result.stderr) == (1, f"trio-llm: cannot write to standard output: {reason}\n")


def test_a_command_whose_output_is_closed_ends_with_one_line(server: ScriptedServer) -> None:
    result = finish(["chat", server.url, "-q", "hi"], stdout=subprocess.DEVNULL, closes_stdout=True)

    assert (result.returncode, result.stderr) == (1, "trio-llm: cannot write to standard output: it is closed\n")


def test_a_command_whose_errors_cannot_be_written_ends_with_its_exit_code() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*COMMAND, "no-such-command"], stderr=full, check=False, timeout=60)

    assert result.returncode == 2
