"""ChildProcess: one process of our own, started, watched and stopped. Used for engines and for front ends.

Started with `subprocess.Popen` on the thread that runs Trio, never through `trio.lowlevel.open_process`: the kernel
ties the child's life to the *thread* that spawned it, and Trio spawns in a worker thread, which ends when idle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

__all__ = ["ChildProcess"]

_STDERR_LINES: Final = 50
_MAX_LINE_BYTES: Final = 4096
_REASON_LINES: Final = 3
_MAX_REASON_CHARS: Final = 300
"""Characters of each of the last lines in the reason of a death; the log has all of them."""


class ChildProcess:
    """A running process. `wait_exit()` and `relay_output()` run in tasks of the owner.

    Args:
        command: the program and its arguments.
        name: what it is, for messages: `engine 0`.
        document: what the process reads from its standard input first. The pipe stays open after it.
        pass_fds: descriptors that it inherits, under the same numbers.
    """

    def __init__(
        self, command: Sequence[str], name: str, *, document: bytes = b"", pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it. Takes a few milliseconds, synchronously.

        Raises:
            OSError: it cannot be started. Nothing is left running.
        """
        self._name = name
        self._last_lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._popen = subprocess.Popen(  # noqa: S603 - the command comes from our own code, not from a request
            command,
            stdin=subprocess.PIPE,
            # What libraries print must not end up in the front end's own output.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # The terminal's Ctrl-C is the front end's to act on.
            start_new_session=True,
            bufsize=0,
            pass_fds=pass_fds,
        )
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError:
            self._pidfd = -1
            self._popen.kill()
            self._popen.wait()
            self.close()
            raise
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait_exit` notices
            self._popen.stdin.write(document)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def _kind(self) -> str:
        """The name without a number at its end."""
        return self._name.rstrip("0123456789 ")

    @property
    def exit_description(self) -> str:
        """How the process ended and the last lines it printed, as one line of text."""
        code = self._popen.poll()
        if code is None:
            how = f"the {self._kind} process is still running"
        elif code < 0:
            how = f"the {self._kind} process was ended by {_signal_name(-code)}"
        else:
            how = f"the {self._kind} process ended with exit code {code}"
        said = [line.strip()[:_MAX_REASON_CHARS] for line in self._last_lines if line.strip()][-_REASON_LINES:]
        if not said:
            return how
        return f"{how}; its last {'line was' if len(said) == 1 else 'lines were'}: {' | '.join(said)}"

    async def wait_exit(self) -> None:
        """Wait until the process is gone. Cancellation: safe; the process keeps running."""
        while self._popen.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)

    async def relay_output(self) -> None:
        """Pass on what it prints, with a prefix, until it closes its end. Lines over 4 KiB are cut into several.

        Cancellation: safe.
        """
        assert self._popen.stdout is not None
        fd = os.dup(self._popen.stdout.fileno())
        async with trio.lowlevel.FdStream(fd) as stream:
            rest = b""
            async for data in stream:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._relay(line)
                if len(rest) > _MAX_LINE_BYTES:
                    self._relay(rest)
                    rest = b""
            if rest:
                self._relay(rest)

    def _relay(self, line: bytes) -> None:
        for start in range(0, max(len(line), 1), _MAX_LINE_BYTES):
            text = line[start : start + _MAX_LINE_BYTES].decode(errors="replace").rstrip("\r")
            self._last_lines.append(text)
            if sys.stderr is None:  # closed before we were started; print() would take standard output instead
                continue
            # The reader of our standard error may be gone; the child must not block on a pipe that is not emptied.
            with contextlib.suppress(OSError, ValueError):
                print(f"[{self._name}] {text}", file=sys.stderr, flush=True)

    def order_stop(self) -> None:
        """Close the pipe, which is the order to stop. Idempotent."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._popen.kill()

    async def stop(self, *, grace_s: float) -> None:
        """Order it to stop, wait up to `grace_s`, kill it if it still runs, and close its descriptors.

        Cancellation: shielded for `grace_s` plus the time a kill takes, so that no process stays behind.
        """
        self.order_stop()
        with trio.move_on_after(grace_s, shield=True):
            await self.wait_exit()
        self.kill()
        with trio.move_on_after(grace_s, shield=True):
            await self.wait_exit()
        self.close()

    def close(self) -> None:
        """Close the descriptors. The process must be gone, or is abandoned. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
