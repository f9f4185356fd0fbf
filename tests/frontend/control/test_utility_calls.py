"""UtilityCalls: each call gets its own answer or an error, and leaves nothing behind."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripted_core import ScriptedCore
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
)
from trio_llm.frontend.control.utility_calls import UtilityCalls
from trio_llm.wire.messages import UtilityCall, UtilityResult


class Callers:
    """Calls that wait, and what came of each."""

    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.utilities = UtilityCalls(self.core)
        self.ends: dict[str, object] = {}

    async def call(self, method: str) -> None:
        try:
            self.ends[method] = await self.utilities.call(method, 1, "x")
        except (EngineDeadError, EngineGenerateError) as error:
            self.ends[method] = f"{type(error).__name__}: {error}"

    @property
    def sent(self) -> list[UtilityCall]:
        return [message for message in self.core.sent if isinstance(message, UtilityCall)]

    def id_of(self, method: str) -> int:
        return next(call.call_id for call in self.sent if call.method == method)


async def test_answers_in_any_order_reach_their_own_callers() -> None:
    callers = Callers()
    async with trio.open_nursery() as nursery:
        for method in "abc":
            nursery.start_soon(callers.call, method)
        await wait_all_tasks_blocked()
        for method in "cab":
            callers.utilities.resolve(UtilityResult(callers.id_of(method), value=method.upper()))

    assert callers.ends == {"a": "A", "b": "B", "c": "C"}
    assert all(call.args == [1, "x"] for call in callers.sent)
    assert not callers.utilities._waiting


async def test_an_error_in_the_answer_is_raised_with_the_methods_name() -> None:
    callers = Callers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.call, "a")
        await wait_all_tasks_blocked()
        callers.utilities.resolve(UtilityResult(callers.id_of("a"), error="no such thing"))

    assert callers.ends == {"a": "EngineGenerateError: a: no such thing"}


async def test_the_engines_end_fails_every_call_now_and_later() -> None:
    callers = Callers()
    async with trio.open_nursery() as nursery:
        for method in "ab":
            nursery.start_soon(callers.call, method)
        await wait_all_tasks_blocked()
        callers.utilities.fail_all(EngineDeadError("gone"))
    await callers.call("c")

    assert callers.ends == dict.fromkeys("abc", "EngineDeadError: gone")
    assert not callers.utilities._waiting
    assert {call.method for call in callers.sent} == {"a", "b"}


async def test_an_answer_that_was_there_before_the_engines_end_is_given() -> None:
    callers = Callers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.call, "a")
        await wait_all_tasks_blocked()
        callers.utilities.resolve(UtilityResult(callers.id_of("a"), value=1))
        callers.utilities.fail_all(EngineDeadError("gone"))

    assert callers.ends == {"a": 1}


async def test_a_cancelled_call_leaves_nothing_and_its_late_answer_is_dropped() -> None:
    callers = Callers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.call, "a")
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert not callers.utilities._waiting

    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.call, "b")
        await wait_all_tasks_blocked()
        callers.utilities.resolve(UtilityResult(callers.id_of("a"), value="late"))
        callers.utilities.resolve(UtilityResult(callers.id_of("b"), value="mine"))
        callers.utilities.resolve(UtilityResult(callers.id_of("b"), value="doubled"))

    assert callers.ends == {"b": "mine"}


async def test_a_call_in_a_cancelled_task_is_not_sent() -> None:
    callers = Callers()
    with trio.CancelScope() as scope:
        scope.cancel()
        await callers.call("a")

    assert scope.cancelled_caught
    assert not callers.sent


async def test_a_call_that_cannot_be_sent_leaves_nothing() -> None:
    callers = Callers()
    with pytest.raises(InvalidRequestError):
        await callers.utilities.call("a", 2**70)

    assert not callers.utilities._waiting


@pytest.mark.parametrize(
    ("max_deaths", "num_calls", "end"),
    [
        (None, 5, None),
        (1, 1, "EngineUnavailableError: the engine died before it answered, and is started again: lost"),
        (2, 2, "EngineGenerateError: a: engines die of this call: 2 did before they answered: lost"),
    ],
)
async def test_a_call_is_made_again_by_the_next_engine_until_it_has_cost_too_many(
    max_deaths: int | None, num_calls: int, end: str | None
) -> None:
    core = ScriptedCore()
    utilities = UtilityCalls(core)
    ends: list[str] = []

    async def call() -> None:
        try:
            await utilities.call("a", max_deaths=max_deaths)
        except (EngineGenerateError, EngineUnavailableError) as error:
            ends.append(f"{type(error).__name__}: {error}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        for _ in range(4):
            core.is_up = False
            utilities.on_engine_lost("lost")
            utilities.on_engine_lost("and the next one, before it was ready")
            core.is_up = True
            utilities.resend()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert len(core.sent) == num_calls
    assert ends == ([] if end is None else [end])
    assert not utilities._waiting


async def test_a_call_that_comes_while_there_is_no_engine_is_sent_to_the_next_and_cancelled_before_that_is_not() -> (
    None
):
    core = ScriptedCore()
    utilities = UtilityCalls(core)
    core.is_up = False
    utilities.on_engine_lost("lost")
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0):
            await utilities.call("never")
        nursery.start_soon(utilities.call, "later")
        await wait_all_tasks_blocked()
        assert core.sent == []
        core.is_up = True
        utilities.resend()

        (sent,) = core.sent
        assert isinstance(sent, UtilityCall)
        assert sent.method == "later"
        utilities.resolve(UtilityResult(sent.call_id))
