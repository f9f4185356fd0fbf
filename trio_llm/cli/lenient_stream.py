"""LenientStream: standard output and error of a process that outlives whoever reads them.

A log collector that ends, a full disk or a closed terminal must not end a server that has clients.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast

__all__ = ["LenientStream", "make_output_lenient"]


class LenientStream:
    """Passes everything on, and drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Returns the length of the text, written or not."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_output_lenient() -> None:
    """Replace `sys.stdout` and `sys.stderr`; also where they are missing, because they were closed at the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
        setattr(sys, name, cast(TextIO, LenientStream(stream)))
