"""EngineLink over real sockets: what arrives malformed is dropped, what is sent last is handed over."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import zmq

from trio_llm.config import EngineConfig
from trio_llm.engine.link import EngineLink
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_from_engine, encode
from trio_llm.wire.messages import Abort, Ack, EngineDead, Heartbeat, ToEngine

LIMIT_S = 10


class FrontEnd:
    """The other end: a ROUTER and a PULL, as the core client binds them."""

    def __init__(self, folder: str) -> None:
        self.boot = EngineBoot(
            config=EngineConfig(),
            engine_index=3,
            epoch=1,
            input_address=f"ipc://{folder}/in",
            output_address=f"ipc://{folder}/out",
        )
        self.context = zmq.Context()
        self.router, self.pull = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        for socket, address in ((self.router, self.boot.input_address), (self.pull, self.boot.output_address)):
            socket.setsockopt(zmq.RCVTIMEO, LIMIT_S * 1000)
            socket.bind(address)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.router.send_multipart([engine_identity(3), frame])


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
    assert (identity, hello) == (engine_identity(3), b"")
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

    assert [decode_from_engine(front_end.pull.recv()) for _ in range(2)] == [Heartbeat(1), EngineDead(1, "the reason")]
