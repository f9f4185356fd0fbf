"""llm.kv_events(): every subscriber gets every change of the prefix cache, or an error that says that it does not."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.scheduling.kv_replica import KVReplica
from tests.support.asking import ask
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from trio_llm.config import EngineConfig
from trio_llm.errors import ConfigError, EngineDeadError, KVEventsLostError, NotSupportedError
from trio_llm.frontend.kv_events import KVEventBatch, KVEventBatches
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import BlockStored

PARAMS = SamplingParams(max_tokens=1, temperature=0)
BOUND_S = 10


def prompt(number: int) -> list[int]:
    """One whole block and a token; no two share anything."""
    return [number] * 33


async def ask_for(fake: FakeSetUp, *numbers: int) -> None:
    for number in numbers:
        await ask(fake.llm, prompt(number), PARAMS)


async def take(batches: KVEventBatches, count: int) -> list[KVEventBatch]:
    with trio.fail_after(BOUND_S):
        return [await anext(batches) for _ in range(count)]


def stored_tokens(batches: list[KVEventBatch]) -> list[list[int]]:
    return [event.token_ids for batch in batches for event in batch.events if isinstance(event, BlockStored)]


async def test_a_subscriber_that_applies_all_events_knows_what_the_engine_can_find() -> None:
    async with open_fake_llm(kv_events=True, num_blocks=6, max_model_len=100) as fake:
        replica = KVReplica()
        async with fake.llm.kv_events() as batches, trio.open_nursery() as nursery:

            async def follow() -> None:
                async for batch in batches:
                    for event in batch.events:
                        replica.apply(event)

            nursery.start_soon(follow)
            for number in range(20):
                await fake.llm.complete([number % 7] * (33 + number), PARAMS)
                await wait_all_tasks_blocked()
                assert replica.known == set(fake.core.core._scheduler._blocks._pool._by_hash)
            nursery.cancel_scope.cancel()

    assert len(replica.ever) > len(replica.known) > 0


async def test_each_subscriber_gets_all_from_its_own_beginning_on() -> None:
    async with open_fake_llm(kv_events=True) as fake, fake.llm.kv_events() as early:
        await ask_for(fake, 1)
        async with fake.llm.kv_events() as late:
            await ask_for(fake, 2)

            assert stored_tokens(await take(early, 2)) == [[1] * 32, [2] * 32]
            assert stored_tokens(await take(late, 1)) == [[2] * 32]


async def test_a_subscriber_may_be_there_before_the_engine_is_ready() -> None:
    async with (
        open_fake_llm(kv_events=True, wait_until_ready=False) as fake,
        fake.llm.kv_events() as batches,
    ):
        await fake.llm.wait_until_ready()
        await ask_for(fake, 1)

        assert stored_tokens(await take(batches, 1)) == [[1] * 32]


async def test_a_slow_subscriber_gets_what_it_has_room_for_then_an_error_and_nothing_waits_for_it() -> None:
    async with open_fake_llm(kv_events=True) as fake, fake.llm.kv_events() as fast:
        async with fake.llm.kv_events(max_unread=2) as slow:
            await ask_for(fake, 1, 2, 3, 4)

            assert stored_tokens(await take(slow, 2)) == [[1] * 32, [2] * 32]
            for _ in range(2):
                with pytest.raises(KVEventsLostError, match="2 batches of KV events were unread"):
                    await take(slow, 1)
        assert len(await take(fast, 4)) == 4

        async with fake.llm.kv_events(max_unread=2) as again:
            await ask_for(fake, 5)
            assert stored_tokens(await take(again, 1)) == [[5] * 32]


async def test_a_subscriber_that_keeps_up_with_room_for_one_loses_nothing() -> None:
    async with open_fake_llm(kv_events=True) as fake, fake.llm.kv_events(max_unread=1) as batches:
        for number in range(9):
            await ask_for(fake, number)
            assert stored_tokens(await take(batches, 1)) == [[number] * 32]


async def test_when_the_engine_dies_each_subscriber_gets_what_it_is_owed_then_the_error() -> None:
    async with open_fake_llm(kv_events=True) as fake:
        async with fake.llm.kv_events() as first, fake.llm.kv_events() as second:
            await ask_for(fake, 1)
            fake.llm.kill("lost its device")
            await fake.llm.wait_dead()

            for batches in (first, second):
                assert len(await take(batches, 1)) == 1
                for _ in range(2):
                    with pytest.raises(EngineDeadError, match="lost its device"):
                        await take(batches, 1)
        with pytest.raises(EngineDeadError, match="lost its device"):
            async with fake.llm.kv_events():
                pass


async def test_a_subscriber_that_waits_is_told_of_the_engines_death() -> None:
    async with open_fake_llm(kv_events=True) as fake, trio.open_nursery() as nursery:

        async def follow() -> None:
            async with fake.llm.kv_events() as batches:
                with pytest.raises(EngineDeadError):
                    await take(batches, 1)

        nursery.start_soon(follow)
        await wait_all_tasks_blocked()
        fake.llm.kill()


async def test_leaving_open_llm_ends_subscriptions_that_live_longer() -> None:
    async with trio.open_nursery() as nursery, open_fake_llm(kv_events=True) as fake:

        async def follow() -> None:
            async with fake.llm.kv_events() as batches:
                with pytest.raises(EngineDeadError, match="was left"):
                    await take(batches, 1)

        nursery.start_soon(follow)
        await wait_all_tasks_blocked()


async def test_outside_its_block_a_subscription_cannot_be_read_and_costs_nothing() -> None:
    async with open_fake_llm(kv_events=True) as fake:
        async with fake.llm.kv_events() as batches:
            await ask_for(fake, 1)
        await ask_for(fake, 2)

        with pytest.raises(trio.ClosedResourceError):
            await take(batches, 1)
        assert fake.llm._kv_events._subscribers == []


async def test_cancelling_a_subscriber_at_any_checkpoint_loses_nothing_and_leaves_nothing_behind() -> None:
    async with open_fake_llm(kv_events=True) as fake, fake.llm.kv_events() as witness:
        number = 0
        seen: list[list[int]] = []

        async def subscribe() -> None:
            nonlocal number
            async with fake.llm.kv_events() as batches:
                number += 1
                await ask_for(fake, number)
                seen.extend(stored_tokens(await take(batches, 1)))

        async def check() -> None:
            await fake.llm.wait_idle()
            assert fake.llm._kv_events._subscribers == [witness]

        assert await cancel_at_every_checkpoint(subscribe, check) >= 4
        assert seen == [[number] * 32]


async def test_an_engine_that_was_not_told_to_record_events_says_so() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(NotSupportedError, match="kv_events=True"):
            fake.llm.kv_events()


async def test_a_subscription_without_room_is_refused() -> None:
    async with open_fake_llm(kv_events=True) as fake:
        with pytest.raises(ValueError, match="max_unread must be at least 1, not 0"):
            fake.llm.kv_events(max_unread=0)


def test_events_of_a_cache_that_is_turned_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="--disable-prefix-caching"):
        EngineConfig(kv_events=True, enable_prefix_caching=False)
