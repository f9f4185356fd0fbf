"""SharedLoad: what each front end has unfinished, in memory that all of them see, so that limits hold for all together.

A table of int64 in an anonymous file: three per front end, which only that front end writes. The supervisor makes the
file, and clears the place of a front end that has died.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

__all__ = ["SharedLoad", "open_load_file"]

_NUM_COUNTS: Final = 3
"""Requests, prompt tokens, connections."""
_CONNECTIONS: Final = 2
_FEW: Final = 4
"""Connections that one process may have more than another before it lets that one accept first."""
_ACCEPTS_NONE: Final = -1
"""Connections of a front end that has not begun to accept, or is gone: nothing is left for it to take."""
_COUNT_BYTES: Final = 8


@contextmanager
def open_load_file(num_front_ends: int) -> Iterator[int]:
    """The descriptor of a new table, in which no front end has anything.

    Raises:
        OSError: there is no memory for it.
    """
    fd = os.memfd_create("trio_llm-load", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_front_ends * _NUM_COUNTS * _COUNT_BYTES)
        with SharedLoad(fd) as load:
            for place in range(num_front_ends):
                load.clear(place)
        yield fd
    finally:
        os.close(fd)


class SharedLoad:
    """The table as one process sees it. Implements `LoadOfOthers`, and has `AcceptTurns`.

    A context manager that unmaps the table.

    Two front ends that admit requests in the very same moment may go over a limit together, by what both admit then.

    Args:
        fd: from `open_load_file`; it may be closed afterwards.
        place: which front end this is, from 0; None: none of them.
    """

    def __init__(self, fd: int, place: int | None = None) -> None:
        self._map = mmap.mmap(fd, 0)
        self._counts = memoryview(self._map).cast("q")
        self._place = place

    def __enter__(self) -> SharedLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._counts.release()
        self._map.close()

    @property
    def num_requests(self) -> int:
        """Unfinished requests of the other front ends."""
        return self._sum_of_others(0)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the other front ends' requests that have no first token."""
        return self._sum_of_others(1)

    def publish(self, num_requests: int, num_tokens: int) -> None:
        """Let the others see what this front end has."""
        assert self._place is not None
        start = self._place * _NUM_COUNTS
        self._counts[start] = num_requests
        self._counts[start + 1] = num_tokens

    @property
    def turns(self) -> _Turns:
        """The connections, for listeners that all front ends share."""
        assert self._place is not None
        return _Turns(self._counts, self._place)

    def clear(self, place: int) -> None:
        """A front end is gone, and all its requests with it."""
        start = place * _NUM_COUNTS
        self._counts[start] = self._counts[start + 1] = 0
        self._counts[start + _CONNECTIONS] = _ACCEPTS_NONE

    def _sum_of_others(self, which: int) -> int:
        total = sum(self._counts[which::_NUM_COUNTS])
        return total if self._place is None else total - self._counts[self._place * _NUM_COUNTS + which]


class _Turns:
    """Implements `AcceptTurns`.

    Args:
        counts: the whole table.
        place: which front end this is.
    """

    def __init__(self, counts: memoryview[int], place: int) -> None:
        self._counts = counts
        self._place = place

    def publish(self, num_connections: int) -> None:
        self._counts[self._place * _NUM_COUNTS + _CONNECTIONS] = num_connections

    def is_ahead(self, num_connections: int) -> bool:
        connections = self._counts.tolist()[_CONNECTIONS::_NUM_COUNTS]
        del connections[self._place]
        accepting = [count for count in connections if count != _ACCEPTS_NONE]
        return num_connections > min(accepting, default=num_connections) + _FEW
