"""Outbox: order is kept, aborts are merged, and the caller gets the error."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm.errors import CodecError
from trio_llm.frontend.core_client.outbox import Outbox
from trio_llm.sampling import SamplingParams
from trio_llm.wire.codec import decode_to_engine
from trio_llm.wire.messages import Abort, Ack, EngineCoreRequest, ToEngine

LIMIT_S = 10


def a_request(request_id: str, token_id: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [token_id], SamplingParams(max_tokens=1, seed=1))


async def taken_from(outbox: Outbox) -> list[ToEngine]:
    with trio.fail_after(LIMIT_S):
        return [decode_to_engine(frame) for frame in await outbox.take()]


async def test_aborts_that_follow_each_other_become_one_message() -> None:
    outbox = Outbox()
    outbox.append(Abort(["a"]))
    outbox.append(Abort(["b", "c"]))
    outbox.append(Abort(["d"]))

    assert await taken_from(outbox) == [Abort(["a", "b", "c", "d"])]


async def test_an_abort_stays_between_the_requests_it_was_queued_between() -> None:
    outbox = Outbox()
    messages: list[ToEngine] = [a_request("a"), Abort(["a"]), a_request("b"), Ack(3), Abort(["b"])]
    for message in messages:
        outbox.append(message)

    assert await taken_from(outbox) == messages


@pytest.mark.parametrize("message", [a_request("x", 2**70), a_request("\udc97"), Abort(["\udc97"])])
async def test_a_message_without_a_form_is_the_senders_error_and_is_not_queued(message: ToEngine) -> None:
    outbox = Outbox()
    outbox.append(Abort(["a"]))

    with pytest.raises(CodecError):
        outbox.append(message)

    outbox.append(Abort(["b"]))
    assert await taken_from(outbox) == [Abort(["a", "b"])]


async def test_a_message_that_was_refused_wakes_no_task(autojump_clock: MockClock) -> None:
    outbox = Outbox()
    with pytest.raises(CodecError):
        outbox.append(a_request("x", 2**70))

    with trio.move_on_after(LIMIT_S) as scope:
        await outbox.take()

    assert scope.cancelled_caught


async def test_taking_waits_for_the_first_message() -> None:
    outbox = Outbox()
    taken: list[ToEngine] = []

    async def take() -> None:
        taken.extend(await taken_from(outbox))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        assert not taken
        outbox.append(Ack(1))

    assert taken == [Ack(1)]


async def test_a_cancelled_take_takes_nothing() -> None:
    outbox = Outbox()
    outbox.append(Ack(1))

    with trio.CancelScope() as scope:
        scope.cancel()
        await outbox.take()

    assert scope.cancelled_caught
    assert await taken_from(outbox) == [Ack(1)]


async def test_a_take_cancelled_while_it_is_woken_loses_nothing() -> None:
    outbox = Outbox()
    scope = trio.CancelScope()
    taken: list[bytes] = []

    async def take() -> None:
        with scope:
            taken.extend(await outbox.take())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        outbox.append(Ack(1))
        scope.cancel()

    received = [decode_to_engine(frame) for frame in taken] or await taken_from(outbox)
    assert received == [Ack(1)]


MESSAGES = st.one_of(
    st.integers(1, 9).map(Ack), st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(Abort), st.none()
)


@given(st.lists(MESSAGES, max_size=30))
def test_whenever_it_is_emptied_the_order_is_the_same(messages: list[Ack | Abort | None]) -> None:
    def flat(some: list[ToEngine]) -> list[object]:
        return [x for m in some for x in (m.request_ids if isinstance(m, Abort) else [m])]

    async def main() -> list[ToEngine]:
        outbox = Outbox()
        taken: list[ToEngine] = []
        has_some = False
        for message in [*messages, None]:  # None stands for a take
            if message is not None:
                outbox.append(message)
                has_some = True
            elif has_some:
                taken += await taken_from(outbox)
                has_some = False
        return taken

    assert flat(trio.run(main)) == flat([message for message in messages if message is not None])
