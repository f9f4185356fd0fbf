"""OneEngineClient with real sockets, pipes and stand-in processes: every kind of end, and what it leaves behind."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.frontend.core_client.stand_ins import program, talker
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.errors import EngineDeadError, EngineStartupError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.core_client.one_engine import OneEngineClient
from trio_llm.frontend.open_llm import open_llm_over
from trio_llm.wire.messages import Abort, Ack, EngineDead, FromEngine, Heartbeat, Progress

LIMIT_S = 20
ECHO = """
go_at_the_end()
hello()
while True:
    message = msgspec.msgpack.decode(dealer.recv())
    send("progress", epoch, str(message), 0, 0)
"""


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the client makes its folder; short, and not shared."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(temporary_folder: Path) -> Iterator[None]:
    """After every test: no folder, no descriptor."""
    num_descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert list(temporary_folder.iterdir()) == []
    temporary_folder.rmdir()
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


@asynccontextmanager
async def running(command: list[str]) -> AsyncIterator[OneEngineClient]:
    """The client with its task. Afterwards the process is gone."""
    client = OneEngineClient(EngineConfig(), command=command)
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            yield client
            nursery.cancel_scope.cancel()
    assert client.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


async def read_to_the_end(client: OneEngineClient) -> tuple[list[FromEngine], str]:
    """All messages, and the reason of the end."""
    messages: list[FromEngine] = []
    try:
        while True:
            messages += await client.receive()
    except EngineDeadError as error:
        return messages, str(error)


# ------------------------------------------------------------------------------------------- messages


async def test_messages_go_both_ways_in_order_also_those_queued_before_the_engine_is_there() -> None:
    async with running(talker(ECHO)) as client:
        for step in range(50):
            client.send_nowait(Ack(step))
            client.send_nowait(Abort([f"r{step}"]))

        echoes: list[FromEngine] = []
        while len(echoes) < 100:
            echoes += await client.receive()

        wanted = [[["ack", step], ["abort", [f"r{step}"]]] for step in range(50)]
        received = [echo.phase for echo in echoes if isinstance(echo, Progress)]
        assert received == [str(message) for pair in wanted for message in pair]


async def test_a_cancelled_receive_takes_nothing() -> None:
    async with running(talker(ECHO)) as client:
        client.send_nowait(Ack(1))
        client.send_nowait(Ack(2))
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.receive()
        with trio.move_on_after(0):
            await client.receive()

        echoes: list[FromEngine] = []
        while len(echoes) < 2:
            echoes += await client.receive()

        assert scope.cancelled_caught
        assert [echo.phase for echo in echoes if isinstance(echo, Progress)] == ["['ack', 1]", "['ack', 2]"]


async def test_a_message_of_another_epoch_is_dropped() -> None:
    code = """
hello()
send('dead', epoch + 1, 'late')
send('heartbeat', 0)
send('progress', epoch, 'load', 1, 2)
wait_for_end()
"""
    async with running(talker(code)) as client:
        assert await client.receive() == [Progress(1, "load", 1, 2)]
        assert client._last_words is None


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xa4dead", b"\x92\xa9heartbeat\xa1x", b"\x90" * 5000])
async def test_an_engine_that_sends_a_malformed_frame_is_given_up(garbage: bytes) -> None:
    code = f"hello(); send('heartbeat', epoch); push.send({garbage!r}); send('heartbeat', epoch)\nhang()"
    async with running(talker(code)) as client:
        messages, reason = await read_to_the_end(client)

        assert messages == [Heartbeat(1)], "what came before it counts, what came after it does not"
        assert reason.startswith("the engine sent a malformed frame")


# ------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the engine process was ended by SIGKILL"),
        ("os._exit(0)", "the engine process ended with exit code 0"),
        (
            "os.write(2, b'first\\nout of memory\\n'); os._exit(3)",
            "the engine process ended with exit code 3; its last lines were: first | out of memory",
        ),
    ],
)
async def test_all_that_was_sent_before_the_end_is_taken_before_the_reason(end: str, reason: str) -> None:
    code = f"hello()\nfor number in range(3000): send('progress', epoch, 'x' * 200, number, 0)\nflush(); {end}"
    async with running(talker(code)) as client:
        messages, found = await read_to_the_end(client)

        assert [m.done for m in messages if isinstance(m, Progress)] == list(range(3000))
        assert found == reason
        with pytest.raises(EngineDeadError, match="the engine process"):
            await client.receive()


async def test_its_last_words_are_the_reason_rather_than_its_exit_code() -> None:
    code = "hello(); send('dead', epoch, 'the device is lost'); print('noise'); flush(); os._exit(1)"
    async with running(talker(code)) as client:
        assert await read_to_the_end(client) == ([EngineDead(1, "the device is lost")], "the device is lost")


async def test_an_engine_that_hangs_after_its_last_words_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_llm.frontend.core_client.one_engine._LAST_WORDS_S", 0.01)
    async with running(talker("hello(); send('dead', epoch, 'the device is lost')\nhang()")) as client:
        _, reason = await read_to_the_end(client)

        assert reason == "the device is lost"


async def test_the_first_reason_of_killing_it_is_reported() -> None:
    async with running(talker("hello(); send('heartbeat', epoch)\nhang()")) as client:
        await client.receive()
        client.kill("a row was lost")
        client.kill("and another")

        assert await read_to_the_end(client) == ([], "a row was lost")


async def test_sending_to_an_engine_that_is_gone_does_nothing() -> None:
    async with running(program("pass")) as client:
        _, reason = await read_to_the_end(client)
        for step in range(10):
            client.send_nowait(Ack(step))
        await trio.testing.wait_all_tasks_blocked()

        assert reason == "the engine process ended with exit code 0"
    client.send_nowait(Ack(99))
    with pytest.raises(EngineDeadError, match="stopped"):
        await client.receive()


async def test_sending_to_an_engine_that_went_after_it_was_connected_does_nothing() -> None:
    async with running(talker("hello(); send('heartbeat', epoch); flush(); os._exit(0)")) as client:
        await read_to_the_end(client)
        client.send_nowait(Ack(1))
        await trio.testing.wait_all_tasks_blocked()
        client.send_nowait(Ack(2))

        with pytest.raises(EngineDeadError, match="exit code 0"):
            await client.receive()


async def test_a_reader_that_waits_when_the_owner_stops_the_engine_gets_an_error() -> None:
    ends: list[str] = []

    async def read(client: OneEngineClient) -> None:
        ends.append((await read_to_the_end(client))[1])

    async with trio.open_nursery() as outer, running(talker("hello(); wait_for_end()")) as client:
        outer.start_soon(read, client)
        await trio.testing.wait_all_tasks_blocked()

    assert ends == ["the engine was stopped"]


async def test_stopping_closes_its_pipe_so_that_it_can_go_by_itself(temporary_folder: Path) -> None:
    sign = temporary_folder / "went"
    code = f"hello(); send('heartbeat', epoch); wait_for_end(); open({str(sign)!r}, 'w').close(); os._exit(0)"
    async with running(talker(code)) as client:
        await client.receive()

    sign.unlink()  # raises if the process was killed


async def test_an_engine_that_ignores_the_end_of_its_pipe_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_llm.frontend.core_client.one_engine._STOP_GRACE_S", 0.05)
    async with running(talker("hello(); send('heartbeat', epoch)\nhang()")) as client:
        await client.receive()


async def test_an_error_beside_it_stops_the_engine_too() -> None:
    with pytest.RaisesGroup(ZeroDivisionError):
        async with running(talker("hello(); wait_for_end()")):
            raise ZeroDivisionError


# ---------------------------------------------------------------------------------------- the folder


async def test_its_sockets_are_local_and_in_a_folder_of_its_users_own(temporary_folder: Path) -> None:
    addresses = "boot['input_address'] + ' ' + boot['output_address']"
    code = f"hello(); send('progress', epoch, {addresses}, 0, 0); wait_for_end()"
    async with running(talker(code)) as client:
        # Made by now, and there until the engine has connected.
        (name,) = os.listdir(temporary_folder)
        folder = temporary_folder / name
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert sorted(os.listdir(folder)) == ["in", "lock", "out"]

        (message,) = await client.receive()

        assert isinstance(message, Progress)
        assert message.phase.split() == [f"ipc://{folder}/in", f"ipc://{folder}/out"]


async def test_its_folder_goes_when_the_engine_has_connected_and_messages_still_pass(temporary_folder: Path) -> None:
    async with running(talker(ECHO)) as client:
        client.send_nowait(Ack(1))
        await client.receive()
        while os.listdir(temporary_folder):
            await trio.lowlevel.checkpoint()

        client.send_nowait(Ack(2))
        (echo,) = await client.receive()

        assert isinstance(echo, Progress)
        assert echo.phase == "['ack', 2]"


async def test_a_configuration_that_cannot_be_sent_is_reported_and_leaves_nothing() -> None:
    client = OneEngineClient(EngineConfig(fake=FakeEngineConfig(script=(2**64,))))

    with trio.fail_after(LIMIT_S), pytest.raises(EngineStartupError, match="configuration"):
        await client.run()

    assert client.pid is None


def test_a_temporary_folder_with_too_long_a_path_is_reported_and_leaves_nothing(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary_folder / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    with pytest.raises(EngineStartupError, match="TMPDIR"):
        OneEngineClient(EngineConfig())

    long.rmdir()  # raises if something is in it


def test_a_missing_temporary_folder_is_reported(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary_folder / "none"))

    with pytest.raises(EngineStartupError, match="TMPDIR"):
        OneEngineClient(EngineConfig())


# ------------------------------------------------------------------------------------------ start-up


@asynccontextmanager
async def opened(command: list[str], *, startup_timeout_s: float = LIMIT_S) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(startup_timeout_s=startup_timeout_s)
    with trio.fail_after(LIMIT_S):
        async with open_llm_over(OneEngineClient(config, command=command), config) as llm:
            yield llm


async def test_a_program_that_cannot_be_started_is_a_start_up_error() -> None:
    with pytest.raises(EngineStartupError, match="no-such-program"):
        async with opened(["/no-such-program"]):
            pass


async def test_an_engine_that_ends_before_it_is_ready_is_a_start_up_error_with_its_words() -> None:
    with pytest.raises(EngineStartupError, match="exit code 1; its last line was: no model here"):
        async with opened(program("import sys; sys.exit('no model here')")):
            pass


async def test_an_engine_without_a_sign_of_life_is_given_up_with_its_phase() -> None:
    with pytest.raises(EngineStartupError, match=r"no sign of life for 0\.05 s in phase 'starting'"):
        async with opened(program("import signal\nwhile True: signal.pause()"), startup_timeout_s=0.05):
            pass


async def test_cancelling_the_start_leaves_nothing() -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()

            nursery.start_soon(cancel)
            async with opened(talker("hello(); wait_for_end()")):
                raise AssertionError("it never becomes ready")

    assert scope.cancelled_caught
