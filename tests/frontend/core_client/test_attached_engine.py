"""AttachedEngine over real sockets: incarnations that come and go, in every order that their owner may report them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import zmq

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.core_client.attached_engine import AttachedEngine
from trio_llm.frontend.core_client.base import EngineLost
from trio_llm.wire.boot import engine_identity
from trio_llm.wire.codec import decode_to_engine, encode
from trio_llm.wire.messages import Abort, FromEngine, Heartbeat

INDEX = 3
BOUND_S = 10.0


class Incarnation:
    """The engine's end of both sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], core: AttachedEngine, epoch: int) -> None:
        self.epoch = epoch
        self.input = context.socket(zmq.DEALER)
        self.input.setsockopt(zmq.IDENTITY, engine_identity(INDEX, epoch))
        self.input.connect(core.sockets.input_address)
        self.input.send(b"")
        self.output = context.socket(zmq.PUSH)
        self.output.connect(core.sockets.output_address)

    def say(self, *steps: int) -> None:
        for step in steps:
            self.output.send(encode(self.message(step)))

    def message(self, step: int) -> FromEngine:
        return Heartbeat(self.epoch, step, engine_index=INDEX)

    async def hear(self) -> object:
        with trio.fail_after(BOUND_S):
            while not self.input.poll(0):  # noqa: ASYNC110 - a socket of zmq, which Trio cannot wait for
                await trio.sleep(0.005)
        return decode_to_engine(self.input.recv())

    def close(self) -> None:
        self.input.close(linger=1000)
        self.output.close(linger=1000)


@dataclass
class SetUp:
    core: AttachedEngine
    kills: list[tuple[int, str]]
    context: zmq.Context[zmq.Socket[bytes]]

    @asynccontextmanager
    async def incarnation(self, epoch: int) -> AsyncIterator[Incarnation]:
        engine = Incarnation(self.context, self.core, epoch)
        try:
            yield engine
        finally:
            engine.close()

    async def take(self, count: int) -> list[object]:
        """The next messages; no more than these come with them."""
        taken: list[object] = []
        with trio.fail_after(BOUND_S):
            while len(taken) < count:
                taken += await self.core.receive()
        assert len(taken) == count
        return taken


@asynccontextmanager
async def attached() -> AsyncIterator[SetUp]:
    kills: list[tuple[int, str]] = []
    core = AttachedEngine(INDEX, lambda *kill: kills.append(kill))
    with zmq.Context() as context:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            yield SetUp(core, kills, context)
            nursery.cancel_scope.cancel()


async def test_what_is_queued_before_the_engine_has_connected_reaches_it() -> None:
    async with attached() as up:
        up.core.send_nowait(Abort(["early"]))
        async with up.incarnation(1) as engine:
            engine.say(1)
            assert await up.take(1) == [engine.message(1)]

            assert await engine.hear() == Abort(["early"])


async def test_a_loss_is_reported_after_all_that_the_incarnation_sent_and_before_the_next_one() -> None:
    async with attached() as up, up.incarnation(1) as first, up.incarnation(2) as second:
        first.say(1, 2)
        assert await up.take(2) == [first.message(1), first.message(2)]
        up.core.send_nowait(Abort(["for the first"]))
        assert await first.hear() == Abort(["for the first"])
        second.say(1)
        first.say(3)
        loss = EngineLost(1, "killed")

        up.core.announce_loss(loss)

        assert await up.take(3) == [first.message(3), loss, second.message(1)]
        up.core.send_nowait(Abort(["for the second"]))
        assert await second.hear() == Abort(["for the second"])


async def test_what_comes_before_the_loss_is_known_waits_for_it() -> None:
    async with attached() as up, up.incarnation(1) as first, up.incarnation(2) as second, up.incarnation(3) as third:
        first.say(1)
        await up.take(1)
        second.say(1, 2)
        third.say(1)
        with trio.move_on_after(0.3) as waiting:
            await up.core.receive()
        assert waiting.cancelled_caught

        losses = [EngineLost(1, "killed"), EngineLost(2, "killed, too")]
        for loss in losses:
            up.core.announce_loss(loss)

        assert await up.take(5) == [losses[0], second.message(1), second.message(2), losses[1], third.message(1)]


async def test_the_loss_of_an_incarnation_that_was_never_heard_of_is_no_loss_of_the_next_one() -> None:
    async with attached() as up, up.incarnation(1) as first, up.incarnation(3) as third:
        first.say(1)
        await up.take(1)
        third.say(1)
        up.core.announce_loss(EngineLost(1, "killed"))
        assert await up.take(2) == [EngineLost(1, "killed"), third.message(1)]

        up.core.announce_loss(EngineLost(2, "killed before it had connected"))
        third.say(2)

        assert await up.take(1) == [third.message(2)]


async def test_what_a_lost_incarnation_did_not_get_goes_to_no_other() -> None:
    async with attached() as up:
        up.core.send_nowait(Abort(["lost"]))  # before any has connected
        up.core.announce_loss(EngineLost(1, "it never connected"))
        assert await up.take(1) == [EngineLost(1, "it never connected")]

        async with up.incarnation(2) as second:
            second.say(1)
            await up.take(1)
            up.core.send_nowait(Abort(["found"]))
            assert await second.hear() == Abort(["found"])


async def test_late_messages_of_a_lost_incarnation_and_of_other_engines_are_dropped() -> None:
    async with attached() as up, up.incarnation(1) as first, up.incarnation(2) as second:
        first.say(1)
        await up.take(1)
        up.core.announce_loss(EngineLost(1, "killed"))
        await up.take(1)
        second.say(1)
        await up.take(1)

        first.say(2)
        first.output.send(encode(Heartbeat(2, 9, engine_index=INDEX + 1)))
        second.say(2)

        assert await up.take(1) == [second.message(2)]


async def test_a_malformed_frame_asks_for_the_end_of_the_incarnation_and_nothing_after_it_counts() -> None:
    async with attached() as up, up.incarnation(1) as first:
        first.say(1)
        await up.take(1)
        first.output.send(b"\xc1 nonsense")
        first.say(2)
        up.core.announce_loss(EngineLost(1, "killed as asked"))

        assert await up.take(1) == [EngineLost(1, "killed as asked")]
        [(epoch, reason)] = up.kills
        assert epoch == 1
        assert reason.startswith("the engine sent a ")


async def test_death_for_good_is_raised_after_what_was_sent_and_again_at_each_call() -> None:
    async with attached() as up, up.incarnation(1) as first:
        first.say(1)
        await up.take(1)
        first.say(2)
        up.core.announce_death(EngineDeadError("gone"))

        assert await up.take(1) == [first.message(2)]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await up.core.receive()


async def test_only_an_incarnation_that_is_there_is_killed() -> None:
    async with attached() as up:
        up.core.kill("nothing runs", for_good=True)
        assert up.kills == []
        async with up.incarnation(1) as first:
            first.say(1)
            await up.take(1)
            up.core.kill("stuck")
            assert up.kills == [(1, "stuck")]


async def test_cancelling_receive_takes_nothing() -> None:
    async with attached() as up, up.incarnation(1) as first:
        for number in range(1, 20):
            with trio.move_on_after(0.001 * (number % 3)):
                await up.core.receive()
                pytest.fail("nothing was sent")
            first.say(number)
            assert await up.take(1) == [first.message(number)]
