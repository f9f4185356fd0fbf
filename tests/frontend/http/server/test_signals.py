"""Signals that stop a server, and the deadline that the kernel keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import trio
import trio.testing

from tests.support.http_server import BOUND_S
from trio_llm.frontend.http.server.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_first_signal_asks_to_stop(number: int) -> None:
    stop = trio.Event()
    # Under nohup the tests would begin with one that is ignored, which is another test's case.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_on_signals, stop)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), number)
            with trio.fail_after(BOUND_S):
                await stop.wait()
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(number, before)


async def test_a_hangup_that_is_ignored_stays_so() -> None:
    stop = trio.Event()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_on_signals, stop)
            await trio.testing.wait_all_tasks_blocked()

            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGHUP, before)


SECOND_SIGNAL = """
import os, signal, sys, trio, trio.testing
from trio_llm.frontend.http.server.signals import stop_on_signals

async def main():
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_signals, stop)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        {between}
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

trio.run(main)
"""

HARD_EXIT = """
from trio_llm.frontend.http.server.signals import hard_exit_after

hard_exit_after(0.01)
while True:
    pass
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_the_second_signal_ends_the_process_at_once() -> None:
    ended = run(SECOND_SIGNAL.format(between=""))

    assert ended.returncode == 1
    assert "SIGTERM again: ending at once" in ended.stderr


def test_a_second_hangup_ends_nothing() -> None:
    ended = run(SECOND_SIGNAL.format(between="os.kill(os.getpid(), signal.SIGHUP)"))

    assert "SIGTERM again: ending at once" in ended.stderr


@pytest.mark.parametrize(
    "how", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)", "r, w = os.pipe(); os.close(r); os.dup2(w, 2)"]
)
def test_the_second_signal_ends_a_process_whose_standard_error_is_gone(how: str) -> None:
    ended = run(SECOND_SIGNAL.format(between=how))

    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


def test_the_hard_deadline_ends_a_process_that_hangs() -> None:
    assert run(HARD_EXIT).returncode == -signal.SIGALRM
