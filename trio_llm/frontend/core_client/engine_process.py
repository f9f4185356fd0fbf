"""EngineProcess: one engine process, started, watched and stopped. Used by the core client.

Started with `subprocess.Popen` on the thread that runs Trio, never through `trio.lowlevel.open_process`: the kernel
ties the engine's life to the *thread* that spawned it, and Trio spawns in a worker thread, which ends when idle.
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

from trio_llm.wire.boot import EngineBoot, encode_boot

__all__ = ["ENGINE_COMMAND", "EngineProcess"]

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "trio_llm.engine")

_STDERR_LINES: Final = 50
_MAX_LINE_BYTES: Final = 4096
_REASON_LINES: Final = 3
_MAX_REASON_CHARS: Final = 300
"""Characters of each of the last lines in the reason of a death; the log has all of them."""


class EngineProcess:
    """A running engine. `wait_exit()` and `relay_stderr()` run in tasks of the owner.

    Args:
        boot: what the process reads from its pipe first.
        command: the program and its arguments.
    """

    def __init__(self, boot: EngineBoot, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """Start it. Takes a few milliseconds, synchronously.

        Raises:
            CodecError: the configuration has no form on the wire. Nothing was started.
            OSError: it cannot be started. Nothing is left running.
        """
        document = encode_boot(boot)  # before anything runs that an error would leave behind
        self._index = boot.engine_index
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
    def exit_description(self) -> str:
        """How the process ended and the last lines it printed, as one line of text."""
        code = self._popen.poll()
        if code is None:
            how = "the engine process is still running"
        elif code < 0:
            how = f"the engine process was ended by {_signal_name(-code)}"
        else:
            how = f"the engine process ended with exit code {code}"
        said = [line.strip()[:_MAX_REASON_CHARS] for line in self._last_lines if line.strip()][-_REASON_LINES:]
        if not said:
            return how
        return f"{how}; its last {'line was' if len(said) == 1 else 'lines were'}: {' | '.join(said)}"

    async def wait_exit(self) -> None:
        """Wait until the process is gone. Cancellation: safe; the process keeps running."""
        while self._popen.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)

    async def relay_stderr(self) -> None:
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
            # The reader of our standard error may be gone; the engine must not block on a pipe that is not emptied.
            with contextlib.suppress(OSError, ValueError):
                print(f"[engine {self._index}] {text}", file=sys.stderr, flush=True)

    def order_stop(self) -> None:
        """Close the pipe, which is the order to stop. Idempotent."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._popen.kill()

    async def stop(self, *, grace_s: float) -> None:
        """Order it to stop, wait up to `grace_s`, kill it if it still runs, and close its descriptors.

        Cancellation: shielded for `grace_s` plus the time a kill takes, so that no engine stays behind.
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
