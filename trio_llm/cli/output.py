"""Standard output and error of the command line: what happens to text that cannot be written.

A command that prints an answer ends with one line of error. A server goes on: a log collector that ends, a full disk or
a closed terminal must not end a process that has clients. Used by cli/main.py and cli/serve.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from trio_llm.errors import TrioLLMError

__all__ = ["CheckedStream", "LenientStream", "OutputError", "checked_output", "make_output_lenient"]


class OutputError(TrioLLMError):
    """Standard output cannot be written, so that a part of the answer is lost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot write to standard output: {reason}")


class CheckedStream:
    """Passes everything on, and raises `OutputError` for what cannot be written.

    Args:
        stream: None: it was closed before the process began.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or raise `OutputError`."""
        if self._stream is None:
            raise OutputError("it is closed")
        with _output_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush, or raise `OutputError`."""
        if self._stream is not None:
            with _output_errors():
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LenientStream:
    """Passes everything on, and drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write if that is possible. Returns the length of the text, written or not."""
        with contextlib.suppress(OSError, ValueError, OutputError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, OutputError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """While the block lasts, `sys.stdout` raises `OutputError`, and `sys.stderr` drops what cannot be written.

    Leaving restores both. One that cannot be flushed becomes None: the interpreter would fail on it again when it ends.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, CheckedStream(before[0]))
    sys.stderr = _lenient(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = map(_none_if_broken, before)


def make_output_lenient() -> None:
    """Let `sys.stdout` and `sys.stderr` drop what cannot be written; also if they were closed at the start."""
    sys.stdout, sys.stderr = _lenient(sys.stdout), _lenient(sys.stderr)


def _lenient(stream: TextIO | None) -> TextIO:
    if stream is None:
        stream = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    return cast(TextIO, LenientStream(stream))


def _none_if_broken(stream: TextIO | None) -> Any:
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        return None
    return stream


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from None
