"""EngineLink over real sockets: what arrives malformed is dropped, what is sent last is handed over."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
import zmq

from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.fake import load_fake
from trio_llm.engine.link import EngineLink
from trio_llm.engine.loop import run_loop
from trio_llm.sampling import SamplingParams
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_from_engine, encode
from trio_llm.wire.messages import (
    Abort,
    Ack,
    AttachClient,
    DetachClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    FromEngine,
    Heartbeat,
    Ready,
    ToEngine,
)

LIMIT_S = 10


class LoopIsOver(BaseException):
    """Ends the loop from inside the link."""


class FrontEnd:
    """The other end: a ROUTER and a PULL, as the core client binds them.

    Args:
        name: tells its addresses from those of others in the folder.
    """

    def __init__(self, folder: str, name: str = "") -> None:
        self.boot = EngineBoot(
            config=EngineConfig(),
            engine_index=3,
            epoch=1,
            input_address=f"ipc://{folder}/in{name}",
            output_address=f"ipc://{folder}/out{name}",
        )
        self.context = zmq.Context()
        self.router, self.pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        for socket, address in ((self.router, self.boot.input_address), (self.pull, self.boot.output_address)):
            socket.setsockopt(zmq.RCVTIMEO, LIMIT_S * 1000)
            socket.bind(address)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.router.send_multipart([engine_identity(3, 1), frame])

    def attachment(self, index: int, epoch: int = 1) -> AttachClient:
        """The message that makes the engine connect here."""
        return AttachClient(index, epoch, self.boot.input_address, self.boot.output_address)

    def received(self) -> FromEngine:
        return decode_from_engine(self.pull.recv())

    def wait_connected(self) -> None:
        assert self.router.recv_multipart() == [engine_identity(3, 1), b""]


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        front_end = FrontEnd(folder)
        yield front_end
        front_end.context.destroy(linger=0)


@pytest.fixture
def link(front_end: FrontEnd) -> Iterator[EngineLink]:
    link = EngineLink(front_end.boot)
    identity, hello = front_end.router.recv_multipart()
    assert (identity, hello) == (engine_identity(3, 1), b"")
    yield link
    link.close()


def received(link: EngineLink, count: int) -> list[ToEngine]:
    """So many messages, in as many turns as it takes."""
    messages: list[ToEngine] = []
    for _ in range(1000):
        messages += [message for _, message in link.receive(LIMIT_S / 100)]
        if len(messages) >= count:
            return messages
    raise AssertionError(f"only {len(messages)} messages came")


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x92\xa4dead\x01", encode(Heartbeat(1)), b"\x91" * 5000])
def test_a_malformed_frame_is_dropped_with_a_line_and_the_next_message_arrives(
    front_end: FrontEnd, link: EngineLink, garbage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    front_end.send(encode(Ack(1)), garbage, garbage, encode(Ack(2)))

    assert received(link, 2) == [Ack(1), Ack(2)]
    assert capsys.readouterr().err.count("dropped a malformed frame") == 2


def test_many_messages_come_in_order_and_not_all_in_one_go(front_end: FrontEnd, link: EngineLink) -> None:
    sent = [Abort([str(number)]) for number in range(5000)]
    front_end.send(*map(encode, sent))

    first = received(link, 1)

    assert len(first) <= 2048
    assert first + received(link, 5000 - len(first)) == sent


def test_receiving_without_time_to_wait_returns_at_once_when_there_is_nothing(link: EngineLink) -> None:
    assert link.receive(0.0) == []


def test_closing_hands_over_the_last_message(front_end: FrontEnd) -> None:
    link = EngineLink(front_end.boot)
    link.send(0, Heartbeat(1))
    link.send(0, EngineDead(1, "the reason"))
    link.close()

    assert [front_end.received() for _ in range(2)] == [Heartbeat(1), EngineDead(1, "the reason")]


# ---------------------------------------------------------------------------------- several clients


@pytest.fixture
def others(front_end: FrontEnd) -> Iterator[list[FrontEnd]]:
    """Two more, in the folder of the first."""
    folder = front_end.boot.input_address.removeprefix("ipc://").removesuffix("/in")
    others = [FrontEnd(folder, f"-{number}") for number in range(2)]
    yield others
    for other in others:
        other.context.destroy(linger=0)


def addressed(link: EngineLink, count: int) -> list[tuple[int, ToEngine]]:
    """So many messages with their clients, in as many turns as it takes."""
    messages: list[tuple[int, ToEngine]] = []
    for _ in range(1000):
        messages += link.receive(LIMIT_S / 100)
        if len(messages) >= count:
            return messages
    raise AssertionError(f"only {len(messages)} messages came")


def test_messages_come_from_and_go_to_each_client(
    front_end: FrontEnd, link: EngineLink, others: list[FrontEnd]
) -> None:
    for index, other in enumerate(others, start=1):
        link.attach(other.attachment(index))
        other.wait_connected()
    for index, one in enumerate([front_end, *others]):
        one.send(*(encode(Ack(10 * index + number)) for number in range(3)))

    messages = addressed(link, 9)
    for index in range(3):
        link.send(index, Heartbeat(index))
    link.send_to_all(EngineDead(1, "the reason"))

    for index in range(3):
        assert [message for client, message in messages if client == index] == [Ack(10 * index + n) for n in range(3)]
    for index, one in enumerate([front_end, *others]):
        assert [one.received(), one.received()] == [Heartbeat(index), EngineDead(1, "the reason")]


def test_messages_of_client_0_come_last_so_that_none_is_read_behind_the_end_of_its_sender(
    front_end: FrontEnd, link: EngineLink, others: list[FrontEnd]
) -> None:
    link.attach(others[0].attachment(1))
    others[0].wait_connected()
    front_end.send(encode(DetachClient(1)))
    others[0].send(encode(Ack(1)))
    for socket in (link._clients[0].input, link._clients[1].input):
        assert socket.poll(LIMIT_S * 1000)

    assert link.receive(0) == [(1, Ack(1)), (0, DetachClient(1))]


def test_a_client_that_is_detached_or_replaced_is_neither_heard_nor_sent_to(
    link: EngineLink, front_end: FrontEnd, others: list[FrontEnd]
) -> None:
    old, new = others
    link.attach(old.attachment(1))
    old.wait_connected()
    old.send(encode(Ack(1)))
    assert link._clients[1].input.poll(LIMIT_S * 1000)

    link.attach(new.attachment(1, epoch=2))
    new.wait_connected()
    link.send(1, Heartbeat(2))
    new.send(encode(Ack(2)))
    front_end.send(encode(Ack(3)))

    assert sorted(addressed(link, 2), key=str) == [(0, Ack(3)), (1, Ack(2))]
    assert new.received() == Heartbeat(2)
    link.detach(1)
    link.detach(1)
    link.send(1, Heartbeat(3))
    assert not old.pull.poll(0)
    assert not new.pull.poll(0)


def test_addresses_that_are_none_leave_the_engine_as_it_is(
    front_end: FrontEnd, link: EngineLink, capsys: pytest.CaptureFixture[str]
) -> None:
    link.attach(AttachClient(1, 1, "nowhere", "ipc://"))

    link.send(1, Heartbeat(1))
    front_end.send(encode(Ack(1)))
    assert addressed(link, 1) == [(0, Ack(1))]
    assert "cannot connect to client 1" in capsys.readouterr().err


class ServedClients:
    """The loop, the core and the link together, and what the front ends of clients 1 and 2 have got."""

    def __init__(self, link: EngineLink, front_ends: list[FrontEnd]) -> None:
        fake = FakeEngineConfig(model_dir="/m")
        config = EngineConfig(fake=fake)
        executor = load_fake(config, lambda *_: None, model_dir="/m")
        self.core = EngineCore(executor, config, epoch=1, engine_index=3, clock=monotonic)
        self.link = link
        self.front_ends = front_ends
        self.rows: list[list[str]] = [[] for _ in front_ends]
        """By front end: the request of each row."""
        self.num_ready = 0
        self.attach, self.detach, self.send = link.attach, link.detach, link.send

    def run_until(self, is_done: Callable[[], bool]) -> None:
        self.is_done = is_done
        self.turns_left = 2000
        with contextlib.suppress(LoopIsOver):
            run_loop(self.core, self)

    def receive(self, timeout_s: float) -> list[tuple[int, ToEngine]]:
        """The link's messages, until what is awaited is done."""
        for front_end, rows in zip(self.front_ends, self.rows, strict=True):
            while front_end.pull.poll(0):
                message = front_end.received()
                self.num_ready += isinstance(message, Ready)
                rows += [row.request_id for row in message.outputs] if isinstance(message, EngineCoreOutputs) else []
        if self.is_done():
            raise LoopIsOver
        self.turns_left -= 1
        assert self.turns_left, "the engine never does what is awaited"
        return self.link.receive(min(timeout_s, 0.01))


def test_an_engine_in_its_loop_serves_clients_that_come_and_go(
    front_end: FrontEnd, link: EngineLink, others: list[FrontEnd], capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    served = ServedClients(link, others)
    front_end.send(*(encode(other.attachment(index)) for index, other in enumerate(others, start=1)))
    served.run_until(lambda: served.num_ready == 2)
    for number, other in enumerate(others):
        other.wait_connected()
        other.send(encode(AttachClient(7, 1, "a", "b")))  # which it may not
        other.send(encode(EngineCoreRequest(f"r{number}", [1, number], params)))
    served.run_until(lambda: served.rows == [["r0"] * 5, ["r1"] * 5])

    front_end.send(encode(DetachClient(1)))
    served.run_until(lambda: 1 not in link._clients)
    others[1].send(encode(EngineCoreRequest("r2", [1], params)))
    served.run_until(lambda: served.rows[1] == ["r1"] * 5 + ["r2"] * 5)

    assert served.rows[0] == ["r0"] * 5
    assert capsys.readouterr().err.count("may neither attach nor detach") == 2
