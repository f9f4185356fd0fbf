"""Do a costly conversion into a directory exactly once, also if several processes want it at the same time.

The process that gets a file lock converts. The directory gets its name by a rename, so a directory of that name is
complete, and a killed conversion leaves only a `.partial` folder that the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trio_llm.engine.device import ProgressCallback
from trio_llm.errors import EngineStartupError

__all__ = ["convert_once"]

_POLL_S = 0.1


def convert_once(target: Path, convert: Callable[[Path], None], *, progress: ProgressCallback) -> None:
    """Make the directory `target` unless it is there.

    Args:
        convert: fills the empty directory that it is given. If it raises, there is no `target`.
        progress: called with the phase convert and an unknown total while another process converts.
    Raises:
        EngineStartupError: the cache folder cannot be written.
    """
    if target.is_dir():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), progress):
            if target.is_dir():
                return  # another process has made it while this one waited
            _remove_leftovers(target)
            partial = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=".partial", dir=target.parent))
            try:
                convert(partial)
                partial.chmod(0o755)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise EngineStartupError(
            f"cannot convert the model into {str(target)!r}: {error.strerror or error}; "
            "set TRIO_LLM_CACHE to a folder that can be written and has room"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, progress: ProgressCallback) -> Iterator[None]:
    """Hold the lock of this path. The kernel frees it when the process that holds it ends in any way."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Polled, so that the front end gets a message now and then and does not take this start for hung.
        while not _try_lock(descriptor):
            progress("convert", 0, 0)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(target: Path) -> None:
    """Only with the lock held: then no living process owns any of them."""
    for leftover in target.parent.glob(f"{_prefix(target)}*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}."
