"""RestartingClient and its policy, over scripted incarnations under a mock clock."""

from __future__ import annotations

import itertools

import pytest
import trio
from trio.testing import MockClock

from trio_llm.errors import EngineDeadError, EngineStartupError
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.frontend.core_client.restart_policy import WINDOW_S, RestartPolicy
from trio_llm.frontend.core_client.restarting import RestartingClient
from trio_llm.wire.messages import Ack, FromEngine, ModelConfig, Progress, Ready, ToEngine

MODEL = ModelConfig(
    model_dir="/m",
    max_model_len=10,
    logits_width=10,
    num_blocks=1,
    block_size=10,
    dtype="none",
    device="fake",
    eos_token_ids=(),
    tasks=("generate",),
    versions={},
)


class Incarnation:
    """Sends the given messages, then dies."""

    def __init__(self, messages: list[FromEngine], reason: str) -> None:
        self._messages = [messages] if messages else []
        self._reason = reason
        self._is_killed = trio.Event()
        self.sent: list[ToEngine] = []
        self.started_s: float | None = None
        self.is_stopped = False

    async def run(self) -> None:
        self.started_s = trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            self.is_stopped = True

    def send_nowait(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> list[FromEngine]:
        await trio.lowlevel.checkpoint()
        if self._messages:
            return self._messages.pop()
        raise EngineDeadError(self._reason)

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        self._reason = reason


class Engines:
    """Makes incarnations; those named in `broken` cannot be made."""

    def __init__(self, *, broken: tuple[int, ...] = (), ready: bool = True) -> None:
        self.made: dict[int, Incarnation] = {}
        self._broken = broken
        self._ready = ready

    def make(self, epoch: int) -> CoreClient:
        if epoch in self._broken:
            raise EngineStartupError(f"no sockets for {epoch}")
        first = Ready(epoch, MODEL) if self._ready else Progress(epoch, "load", 0, 0)
        self.made[epoch] = Incarnation([first], f"death of {epoch}")
        return self.made[epoch]


async def read(client: RestartingClient) -> list[FromEngine | EngineLost | EngineDeadError]:
    """Everything until the end for good."""
    heard: list[FromEngine | EngineLost | EngineDeadError] = []
    with trio.fail_after(10 * WINDOW_S):
        while True:
            try:
                heard += await client.receive()
            except EngineDeadError as error:
                return [*heard, error]


async def run(engines: Engines, max_restarts: int) -> list[FromEngine | EngineLost | EngineDeadError]:
    client = RestartingClient(engines.make, RestartPolicy(max_restarts))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        heard = await read(client)
        nursery.cancel_scope.cancel()
    assert all(one.is_stopped for one in engines.made.values() if one.started_s is not None)
    return heard


async def test_each_death_is_reported_and_the_next_engine_heard_until_the_limit(autojump_clock: MockClock) -> None:
    *heard, last = await run(Engines(), 2)

    assert heard == [
        Ready(1, MODEL),
        EngineLost(1, "death of 1"),
        Ready(2, MODEL),
        EngineLost(2, "death of 2"),
        Ready(3, MODEL),
    ]
    assert isinstance(last, EngineDeadError)
    assert str(last).startswith("death of 3; it was started again 2 times")
    assert "--max-engine-restarts" in str(last)


async def test_engines_are_started_again_after_longer_and_longer_pauses(autojump_clock: MockClock) -> None:
    engines = Engines()
    await run(engines, 7)

    starts = [one.started_s for one in engines.made.values() if one.started_s is not None]
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(starts)]
    assert pauses == [0.5, 1, 2, 4, 8, 8, 8]


async def test_an_engine_that_was_never_ready_is_not_started_again(autojump_clock: MockClock) -> None:
    engines = Engines(ready=False)
    *_, last = await run(engines, 5)

    assert str(last) == "death of 1"
    assert list(engines.made) == [1]


async def test_an_engine_that_is_killed_for_good_is_not_started_again(autojump_clock: MockClock) -> None:
    engines = Engines()
    client = RestartingClient(engines.make, RestartPolicy(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        assert await client.receive() == [Ready(1, MODEL)]
        client.kill("its files are broken", for_good=True)
        heard = await read(client)
        nursery.cancel_scope.cancel()

    assert [str(one) for one in heard] == ["its files are broken"]
    assert list(engines.made) == [1]


async def test_an_incarnation_that_cannot_be_made_counts_as_a_death(autojump_clock: MockClock) -> None:
    heard = await run(Engines(broken=(2, 3)), 3)

    assert [one for one in heard if isinstance(one, EngineLost)] == [
        EngineLost(1, "death of 1"),
        EngineLost(2, "no sockets for 2"),
        EngineLost(3, "no sockets for 3"),
    ]
    assert Ready(4, MODEL) in heard


async def test_the_first_incarnation_that_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(EngineStartupError, match="no sockets for 1"):
        RestartingClient(Engines(broken=(1,)).make, RestartPolicy(5))


async def test_messages_go_to_the_newest_engine(autojump_clock: MockClock) -> None:
    engines = Engines()
    client = RestartingClient(engines.make, RestartPolicy(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        for _ in range(3):
            await client.receive()
        client.send_nowait(Ack(1))
        nursery.cancel_scope.cancel()

    assert (engines.made[1].sent, engines.made[2].sent) == ([], [Ack(1)])


async def test_a_cancelled_receive_between_two_engines_takes_nothing(autojump_clock: MockClock) -> None:
    engines = Engines()
    client = RestartingClient(engines.make, RestartPolicy(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        for _ in range(2):
            await client.receive()
        with trio.move_on_after(0.1) as scope:
            await client.receive()
        assert scope.cancelled_caught
        assert await client.receive() == [Ready(2, MODEL)]
        nursery.cancel_scope.cancel()


def test_restarts_long_ago_do_not_count() -> None:
    policy = RestartPolicy(2)

    assert [policy.next_delay_s(now_s) for now_s in (0.0, 1.0, 2.0)] == [0.5, 1.0, None]
    assert policy.next_delay_s(WINDOW_S - 0.1) is None
    assert policy.next_delay_s(WINDOW_S) == 1.0
    assert policy.next_delay_s(3 * WINDOW_S) == 0.5


async def test_a_client_that_is_killed_for_good_between_two_incarnations_makes_no_other(
    autojump_clock: MockClock,
) -> None:
    engines = Engines()
    client = RestartingClient(engines.make, RestartPolicy(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        assert [type(message) for message in await client.receive()] == [Ready]
        assert [type(message) for message in await client.receive()] == [EngineLost]
        client.kill("the tokenizer is broken", for_good=True)

        with trio.fail_after(60), pytest.raises(EngineDeadError, match="the tokenizer is broken"):
            await client.receive()
        nursery.cancel_scope.cancel()

    assert list(engines.made) == [1]


def test_a_policy_may_give_the_first_restart_no_delay() -> None:
    policy = RestartPolicy(4, is_first_at_once=True)

    assert [policy.next_delay_s(now_s) for now_s in range(5)] == [0.0, 0.5, 1.0, 2.0, None]
    assert policy.next_delay_s(2 * WINDOW_S) == 0.0
