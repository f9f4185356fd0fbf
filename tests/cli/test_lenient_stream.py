"""A server's output may be lost; the server may not."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from trio_llm.cli.lenient_stream import LenientStream, make_output_lenient


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
