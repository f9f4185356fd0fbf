"""Signals that stop a server, and a deadline that the kernel keeps. Used by the command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress

import trio

__all__ = ["hard_exit_after", "stop_on_signals"]

_logger = logging.getLogger(__name__)


async def stop_on_signals(stop: trio.Event) -> None:
    """Set `stop` at the first SIGTERM, SIGINT or SIGHUP. At a second one, end the process at once, with exit code 1.

    A closed terminal may send SIGHUP twice, so a second SIGHUP ends nothing. Where SIGHUP is ignored already, as under
    `nohup`, it stays ignored.

    Runs until cancelled; then the signals do what they did before.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with trio.open_signal_receiver(*numbers) as signals:
        async for number in signals:
            name = signal.Signals(number).name
            if not stop.is_set():
                _logger.info("%s: draining, so that running requests can end; a second signal stops at once", name)
                stop.set()
            elif number != signal.SIGHUP:
                _say(f"{name} again: ending at once")
                os._exit(1)


def _say(text: str) -> None:
    """Print to standard error, which may be closed, or its terminal gone."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def hard_exit_after(seconds: float) -> None:
    """Let the kernel end this process after `seconds`, even if it hangs. 0 cancels that.

    SIGALRM with its default action needs no thread and no interpreter, so it works when Python code cannot run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
