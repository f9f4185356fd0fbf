"""EngineSockets: the sockets between a front end and one engine process, in a private folder. Used by the core client.

A folder is locked for as long as its front end lives. One that a killed front end has left is removed at a later start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import zmq

from trio_llm.errors import EngineStartupError
from trio_llm.frontend.core_client.trio_socket import TrioSocket

__all__ = ["EngineSockets", "remove_abandoned_folders"]

_PREFIX: Final = "trio_llm-"
_LOCK: Final = "lock"
_FILES: Final = {_LOCK, "in", "out"}
_YOUNG_S: Final = 60.0
"""A folder younger than this is left alone: its owner may not have locked it yet."""


class EngineSockets:
    """A ROUTER to the engine and a PULL from it.

    Raises:
        EngineStartupError: they cannot be made; the message names TMPDIR.
    """

    def __init__(self) -> None:
        # Private to this user (0700), and short: an ipc path has about 100 bytes.
        try:
            remove_abandoned_folders(Path(tempfile.gettempdir()))
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock_fd = _make_lock(self.folder)
        except OSError as error:
            raise EngineStartupError(
                f"cannot make a folder for sockets: {error}; set TMPDIR to a folder that can be written"
            ) from error
        self._context = zmq.Context()
        try:
            self.to_engine = TrioSocket(self._bind(zmq.ROUTER, "in"))
            self.from_engine = TrioSocket(self._bind(zmq.PULL, "out"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._release()
            raise EngineStartupError(
                f"cannot make sockets in {self.folder}: {error}; set TMPDIR to a folder with a short path that can "
                "be written (an ipc address has about 100 bytes)"
            ) from error

    @property
    def input_address(self) -> str:
        """Where the engine connects to receive."""
        return self._address("in")

    @property
    def output_address(self) -> str:
        """Where the engine connects to send."""
        return self._address("out")

    def remove_folder(self) -> None:
        """Remove the folder early. Connected ends do not need it, and without it nothing can stay behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the sockets, dropping what is unsent, and remove the folder. Once."""
        self.to_engine.close()
        self.from_engine.close()
        self._context.destroy(linger=0)
        self._release()

    def _release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock_fd)

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # The credit bounds what is under way; a high-water mark would drop or block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.ROUTER:
            # A message to an unknown peer is an error then, not silently dropped.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"


def remove_abandoned_folders(parent: Path, *, now_s: float | None = None) -> list[Path]:
    """Remove folders of sockets whose front end is gone. Never fails.

    A folder is ours if it has such a name, belongs to this user and holds our files alone. Nothing else is touched.

    Args:
        now_s: seconds since the epoch; None: now.

    Returns:
        The folders that were removed.
    """
    now_s = time.time() if now_s is None else now_s
    removed = []
    with suppress(OSError):
        for path in list(parent.glob(f"{_PREFIX}*")):
            with suppress(OSError):
                if _remove_if_abandoned(path, now_s):
                    removed.append(path)
    return removed


def _make_lock(folder: Path) -> int:
    """The descriptor of a new folder's lock, which is taken.

    Raises:
        OSError: it cannot be made. The folder is removed.
    """
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        lock_fd = os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        undo.pop_all()
    return lock_fd


def _remove_if_abandoned(folder: Path, now_s: float) -> bool:
    """Remove a folder whose front end is gone. Returns whether it was ours, and removed.

    Raises:
        OSError: its front end lives, or it went meanwhile.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or now_s - found.st_mtime < _YOUNG_S:
        return False
    names = os.listdir(folder)
    if not names:  # its front end was killed before it could lock the folder
        folder.rmdir()
        return True
    if _LOCK not in names or not set(names) <= _FILES:
        return False
    lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in names:
            (folder / name).unlink()
        folder.rmdir()
    finally:
        os.close(lock_fd)
    return True
