"""EngineProcess over stand-in programs: what it prints, how it ends, and that nothing of it stays."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from tests.frontend.core_client.stand_ins import program
from trio_llm.config import EngineConfig
from trio_llm.frontend.core_client.engine_process import EngineProcess
from trio_llm.wire.boot import EngineBoot

LIMIT_S = 20
BOOT = EngineBoot(config=EngineConfig(), engine_index=7, epoch=1, input_address="ipc://in", output_address="ipc://out")


@asynccontextmanager
async def started(code: str) -> AsyncIterator[EngineProcess]:
    process = EngineProcess(BOOT, command=program(code))
    try:
        with trio.fail_after(LIMIT_S):
            yield process
    finally:
        process.kill()
        await process.stop(grace_s=LIMIT_S)


async def run_to_its_end(code: str) -> EngineProcess:
    """Relays what it prints until it is gone."""
    async with started(code) as process:
        await process.relay_output()
        await process.wait_exit()
        return process


def relayed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == "", "the front end's own output must stay clean"
    return captured.err.splitlines()


async def test_what_it_prints_comes_out_on_standard_error_with_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    await run_to_its_end(
        "import sys; print('to out', flush=True); print('to err', file=sys.stderr); print('\\nlast\\r')"
    )

    assert relayed(capsys) == ["[engine 7] to out", "[engine 7] to err", "[engine 7] ", "[engine 7] last"]


async def test_a_last_line_without_a_newline_is_relayed(capsys: pytest.CaptureFixture[str]) -> None:
    process = await run_to_its_end("import os; os.write(2, b'one\\ntw'); os.write(2, b'o')")

    assert relayed(capsys) == ["[engine 7] one", "[engine 7] two"]
    assert process.exit_description.endswith("its last lines were: one | two")


@pytest.mark.parametrize("end", ["", "\\n"])
async def test_a_long_line_is_cut_and_nothing_of_it_is_lost(capsys: pytest.CaptureFixture[str], end: str) -> None:
    await run_to_its_end(f"import os; [os.write(2, b'%06d ' % n) for n in range(1500)]; os.write(2, b'{end}')")

    lines = [line.removeprefix("[engine 7] ") for line in relayed(capsys)]
    assert "".join(lines) == "".join(f"{n:06d} " for n in range(1500))
    assert len(lines) > 1
    assert max(map(len, lines)) <= 4096


async def test_bytes_that_are_no_text_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    await run_to_its_end("import os; os.write(2, b'caf\\xc3\\xa9 \\xff!\\n')")

    assert relayed(capsys) == ["[engine 7] café \N{REPLACEMENT CHARACTER}!"]


class _Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [_Broken, _closed, lambda: None], ids=["broken", "closed", "none"])
async def test_a_standard_error_without_a_reader_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make: Callable[[], io.StringIO | None]
) -> None:
    monkeypatch.setattr("sys.stderr", make())

    process = await run_to_its_end("import sys; [print('x' * 1000) for _ in range(200)]; sys.exit('the reason')")

    assert process.exit_description.startswith("the engine process ended with exit code 1; its last lines were: ")
    assert process.exit_description.endswith(" | the reason")
    assert relayed(capsys) == []


async def test_only_the_last_fifty_lines_are_kept() -> None:
    process = await run_to_its_end("for number in range(200): print(number)")

    assert list(process._last_lines) == [str(number) for number in range(150, 200)]


@pytest.mark.parametrize(
    ("code", "description"),
    [
        ("pass", "ended with exit code 0"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "was ended by signal 40"),
        ("import os; os.write(2, b'because\\n  \\n'); os.abort()", "was ended by SIGABRT; its last line was: because"),
    ],
)
async def test_its_end_is_described_in_words(code: str, description: str) -> None:
    process = await run_to_its_end(code)

    assert process.exit_description == f"the engine process {description}"


async def test_while_it_runs_the_description_says_so_and_waiting_can_be_cancelled() -> None:
    async with started("import signal; signal.pause()") as process:
        with trio.CancelScope() as scope:
            scope.cancel()
            await process.wait_exit()

        assert scope.cancelled_caught
        assert process.exit_description == "the engine process is still running"


async def test_stopping_ends_its_pipe_and_lets_it_go_by_itself() -> None:
    async with started("import os\nwhile os.read(0, 1000): pass\nos._exit(5)") as process:
        await process.stop(grace_s=LIMIT_S)

        assert process.exit_description == "the engine process ended with exit code 5"


async def test_one_that_ignores_the_end_of_its_pipe_is_killed_after_the_grace() -> None:
    async with started("import signal\nwhile True: signal.pause()") as process:
        await process.stop(grace_s=0.05)

        assert process.exit_description == "the engine process was ended by SIGKILL"


async def test_stopping_in_a_cancelled_task_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = EngineProcess(BOOT, command=program("import signal\nwhile True: signal.pause()"))

    with trio.CancelScope() as scope:
        scope.cancel()
        await process.stop(grace_s=0.05)

    assert process.exit_description == "the engine process was ended by SIGKILL"
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert len(os.listdir("/proc/self/fd")) == before
    process.close()


async def test_a_process_that_cannot_be_watched_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError("too many files")

    monkeypatch.setattr("os.pidfd_open", refuse)
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="too many files"):
        EngineProcess(BOOT, command=program("import signal; signal.pause()"))

    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_terminals_interrupt_is_not_for_it() -> None:
    async with started("import signal; signal.pause()") as process:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait_exit()


async def test_the_reason_has_the_last_three_lines_that_say_something_each_cut_and_all_on_one_line() -> None:
    code = (
        "print('zero'); print('one'); print('x' * 1000); print(); print('three', flush=True); import sys; sys.exit(7)"
    )
    async with started(code) as process:
        with trio.fail_after(LIMIT_S):
            await process.relay_output()
            await process.wait_exit()

        assert process.exit_description == (
            f"the engine process ended with exit code 7; its last lines were: one | {'x' * 300} | three"
        )
