"""TrioSocket over real zmq sockets: nothing lost, nothing doubled, no task left asleep, whatever is cancelled."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import zmq
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm.frontend.core_client.trio_socket import TrioSocket

LIMIT_S = 60


class Pair:
    """Two connected sockets."""

    def __init__(self, folder: Path, left: int, right: int, *, high_water_mark: int = 0) -> None:
        self.context = zmq.Context()
        address = f"ipc://{folder}/s"
        self.raw_left, self.raw_right = self.context.socket(left), self.context.socket(right)
        for raw in (self.raw_left, self.raw_right):
            raw.setsockopt(zmq.LINGER, 0)
            raw.setsockopt(zmq.SNDHWM, high_water_mark)
            raw.setsockopt(zmq.RCVHWM, high_water_mark)
        self.raw_left.bind(address)
        self.raw_right.connect(address)
        self.left, self.right = TrioSocket(self.raw_left), TrioSocket(self.raw_right)

    def close(self) -> None:
        self.left.close()
        self.right.close()
        self.context.destroy(linger=0)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z")


@pytest.fixture
async def pipe(folder: Path) -> AsyncIterator[Pair]:
    """PULL on the left, PUSH on the right."""
    pair = Pair(folder, zmq.PULL, zmq.PUSH)
    yield pair
    pair.close()


@pytest.fixture
async def narrow_pipe(folder: Path) -> AsyncIterator[Pair]:
    """As `pipe`, but the sender is blocked after a few messages."""
    pair = Pair(folder, zmq.PULL, zmq.PUSH, high_water_mark=5)
    yield pair
    pair.close()


@pytest.fixture
async def dealers(folder: Path) -> AsyncIterator[Pair]:
    pair = Pair(folder, zmq.DEALER, zmq.DEALER)
    yield pair
    pair.close()


async def test_messages_arrive_in_order(pipe: Pair) -> None:
    with trio.fail_after(LIMIT_S):
        for number in range(100):
            await pipe.right.send_multipart([b"%d" % number, b"x"])

        received = [await pipe.left.recv_multipart() for _ in range(100)]

    assert received == [[b"%d" % number, b"x"] for number in range(100)]


async def test_recv_frames_takes_what_is_there_up_to_its_limit(pipe: Pair) -> None:
    with trio.fail_after(LIMIT_S):
        for number in range(300):
            await pipe.right.send_multipart([b"%d" % number])
        batches: list[list[bytes]] = []
        while sum(len(batch) for batch in batches) < 300:
            batches.append(await pipe.left.recv_frames(limit=100))

    assert max(len(batch) for batch in batches) <= 100
    assert [frame for batch in batches for frame in batch] == [b"%d" % n for n in range(300)]


async def test_a_blocked_sender_goes_on_when_there_is_room(narrow_pipe: Pair) -> None:
    async def send() -> None:
        for number in range(500):
            await narrow_pipe.right.send_multipart([b"%d" % number])

    received: list[bytes] = []
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while len(received) < 500:
                received.extend(await narrow_pipe.left.recv_frames())

    assert received == [b"%d" % n for n in range(500)]


async def test_two_tasks_that_send_and_receive_on_one_socket_never_miss_a_wake_up(dealers: Pair) -> None:
    # Every send may take the signal that the receiver of the same socket sleeps on.
    total, burst = 6_000, 1000
    echoed: list[bytes] = []

    async def echo() -> None:
        while True:
            for frame in await dealers.right.recv_frames():
                await dealers.right.send_multipart([frame])

    async def send() -> None:
        for start in range(0, total, burst):
            for number in range(start, start + burst):
                await dealers.left.send_multipart([b"%d" % number])
            await trio.lowlevel.checkpoint()

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            nursery.start_soon(send)
            while len(echoed) < total:
                echoed.extend(await dealers.left.recv_frames())
            nursery.cancel_scope.cancel()

    assert echoed == [b"%d" % n for n in range(total)]


async def test_cancelling_at_random_loses_and_doubles_nothing(dealers: Pair) -> None:
    # Several readers and a writer on one socket, each cancelled again and again.
    total = 4000
    dice = random.Random(1)
    received: list[int] = []
    is_complete = trio.Event()

    async def read(socket: TrioSocket) -> None:
        while True:
            with trio.move_on_after(dice.random() * 0.0005):
                while True:
                    received.append(int((await socket.recv_multipart())[0]))
                    if len(received) >= total:
                        is_complete.set()

    async def write(socket: TrioSocket, numbers: range) -> None:
        for number in numbers:
            is_sent = False
            while not is_sent:
                with trio.move_on_after(dice.random() * 0.0005):
                    await socket.send_multipart([b"%d" % number])
                    is_sent = True

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for socket in (dealers.left, dealers.right):
                nursery.start_soon(read, socket)
                nursery.start_soon(read, socket)
            nursery.start_soon(write, dealers.left, range(total // 2))
            nursery.start_soon(write, dealers.right, range(total // 2, total))
            await is_complete.wait()
            nursery.cancel_scope.cancel()

    assert sorted(received) == list(range(total))


async def test_an_operation_in_a_cancelled_task_touches_nothing(pipe: Pair) -> None:
    with trio.fail_after(LIMIT_S):
        await pipe.right.send_multipart([b"a"])
        with trio.CancelScope() as scope:
            scope.cancel()
            await pipe.left.recv_multipart()
        with trio.CancelScope() as scope:
            scope.cancel()
            await pipe.right.send_multipart([b"never sent"])
        await pipe.right.send_multipart([b"b"])

        assert [await pipe.left.recv_multipart(), await pipe.left.recv_multipart()] == [[b"a"], [b"b"]]


async def test_closing_wakes_all_tasks_that_wait(pipe: Pair) -> None:
    outcomes: list[str] = []

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pipe.left.recv_multipart()
        outcomes.append("closed")

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            await wait_all_tasks_blocked()
            pipe.left.close()

    assert outcomes == ["closed"] * 3
    with pytest.raises(trio.ClosedResourceError):
        await pipe.left.recv_multipart()
    pipe.left.close()


async def test_an_interrupt_ends_the_waiting_of_all_who_take_frames_and_loses_none(pipe: Pair) -> None:
    taken: list[list[bytes]] = []

    async def read() -> None:
        taken.append(await pipe.left.recv_frames())

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            await wait_all_tasks_blocked()
            pipe.left.interrupt()
        assert taken == [[], [], []]

        await pipe.right.send_multipart([b"later"])
        assert await pipe.left.recv_frames() == [b"later"]


async def test_an_interrupt_is_no_matter_for_who_wants_a_whole_message(pipe: Pair) -> None:
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                assert await pipe.left.recv_multipart() == [b"a", b"b"]

            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            pipe.left.interrupt()
            await wait_all_tasks_blocked()
            await pipe.right.send_multipart([b"a", b"b"])


async def test_a_mandatory_router_tells_of_an_unknown_peer(folder: Path) -> None:
    pair = Pair(folder, zmq.ROUTER, zmq.DEALER)
    pair.raw_left.setsockopt(zmq.ROUTER_MANDATORY, 1)

    with trio.fail_after(LIMIT_S), pytest.raises(zmq.ZMQError):
        await pair.left.send_multipart([b"nobody", b"x"])

    pair.close()


async def test_every_operation_is_a_schedule_point(pipe: Pair) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            for _ in range(50):
                await pipe.right.send_multipart([b"x"])
            nursery.cancel_scope.cancel()

    assert turns >= 40


# ---------------------------------------------------------------------------------- look by look, scripted


class ScriptedSocket:
    """A zmq socket in what matters here: whatever is done to it takes the signal off its descriptor, and things happen
    to it right after any of these moments.

    Args:
        arrives_after: the number of moments after which a message comes in.
        opens_after: the number of moments after which it can send.
    """

    closed = False

    def __init__(self, *, arrives_after: int, opens_after: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._happens = {"arrives": arrives_after, "opens": opens_after}
        self._seen: set[str] = set()
        """What has happened and was noticed."""
        self._moments = 0
        self._has_message = True
        if 0 in self._happens.values():
            os.eventfd_write(self.fd, 1)

    def _moment(self) -> set[str]:
        """What is known now. What happens right after it is not known, but signalled."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._seen |= {event for event, after in self._happens.items() if after <= self._moments}
        known = set(self._seen)
        self._moments += 1
        if self._moments in self._happens.values():
            os.eventfd_write(self.fd, 1)
        return known

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.fd
        assert option == zmq.EVENTS
        known = self._moment()
        return (zmq.POLLIN if "arrives" in known and self._has_message else 0) | (
            zmq.POLLOUT if "opens" in known else 0
        )

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        if "opens" not in self._moment():
            raise zmq.Again

    def recv_multipart(self, flags: int) -> list[bytes]:
        if "arrives" not in self._moment() or not self._has_message:
            raise zmq.Again
        self._has_message = False
        return [b"message"]


@pytest.mark.parametrize("arrives_after", range(16))
@pytest.mark.parametrize("opens_after", range(16))
@pytest.mark.parametrize("receives_first", [True, False])
def test_no_task_sleeps_on_whatever_happens_between_any_two_looks(
    arrives_after: int, opens_after: int, receives_first: bool
) -> None:
    raw = ScriptedSocket(arrives_after=arrives_after, opens_after=opens_after)
    socket = TrioSocket(raw)  # type: ignore[arg-type]
    done: list[str] = []

    async def receive() -> None:
        assert await socket.recv_multipart() == [b"message"]
        done.append("received")

    async def send() -> None:
        for _ in range(3):
            await socket.send_multipart([b"x"])
        done.append("sent")

    async def look_on() -> None:
        """Until everything has happened: moments pass only at looks."""
        while raw._moments <= max(arrives_after, opens_after):
            await wait_all_tasks_blocked()
            raw._moments += 1
            if raw._moments in (arrives_after, opens_after):
                os.eventfd_write(raw.fd, 1)

    async def main() -> None:
        tasks = [receive, send] if receives_first else [send, receive]
        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:
                for task in tasks:
                    nursery.start_soon(task)
                    await wait_all_tasks_blocked()
                nursery.start_soon(look_on)

    try:
        # A mock second: it is over as soon as no task has anything to do.
        trio.run(main, clock=MockClock(autojump_threshold=0.02))
    finally:
        os.close(raw.fd)

    assert sorted(done) == ["received", "sent"]
