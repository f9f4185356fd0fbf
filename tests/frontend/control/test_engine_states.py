"""The states of an engine change as the table says: nothing else happens, and all of it does."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, get_args

import trio
from trio.testing import MockClock

from tests.support.engine_states import TRANSITIONS
from trio_llm.errors import TrioLLMError
from trio_llm.frontend.control.status import EngineState
from trio_llm.testing import FakeLLM, open_fake_llm
from trio_llm.testing.in_memory import InMemoryCoreClient

STORIES: Final = [
    "ready kill sleep wake kill",
    "ready sleep wake sleep kill wait kill drain",
    "ready sleep drain",
    "ready sleep kill-for-good",
    "ready sleep stall resume",
    "ready sleep stall wait",
    "ready stall resume",
    "ready stall wait wait",
    "ready stall drain",
    "ready stall kill-for-good",
    "ready kill-for-good",
    "ready drain kill-for-good",
    "ready next-cannot-start kill",
    "ready stall kill sleep wake wait",
    "ready kill drain",
]
"""What happens, each thing after half the stall timeout and a bit, but where a drain or the end is to come sooner."""

STALL_S: Final = 20.0


async def tell(story: str) -> set[tuple[EngineState, EngineState]]:
    """The changes of state that are seen."""
    steps = story.split()
    is_exit = "kill-for-good" in steps
    settings: dict[str, Any] = {
        "on_engine_death": "exit" if is_exit else "restart",
        "max_engine_restarts": 1 if "next-cannot-start" in steps else 5,
        "stall_timeout_s": STALL_S,
    }
    changes: set[tuple[EngineState, EngineState]] = set()
    async with open_fake_llm(**settings) as llm, trio.open_nursery() as nursery:

        async def look() -> None:
            last = llm.status.state
            while True:
                await trio.sleep(0.05)
                if (state := llm.status.state) != last:
                    changes.add((last, state))
                    last = state

        nursery.start_soon(look)
        for step in steps[1:]:
            await trio.sleep(0.2)
            do(step, llm, nursery)
            # A restart that is under way is not waited for, where the story goes on without it.
            await trio.sleep(0.1 if "drain" in steps and "stall" not in steps else STALL_S * 0.55)
        await trio.sleep(2 * STALL_S)
        nursery.cancel_scope.cancel()
    return changes


async def tell_of_loading(end: str) -> set[tuple[EngineState, EngineState]]:
    async with open_fake_llm(wait_until_ready=False) as llm:
        first = llm.status.state
        match end:
            case "ready":
                await llm.wait_until_ready()
            case "draining":
                llm.drain()
            case "dead":
                llm.core._outbox.clear()  # it never comes to say that it is ready
                llm.kill()
                await llm.wait_dead()
        return {(first, llm.status.state)}


def do(step: str, llm: FakeLLM, nursery: trio.Nursery) -> None:
    async def call(name: str) -> None:
        with suppress(TrioLLMError):
            await getattr(llm, name)()

    match step:
        case "kill" | "kill-for-good":
            llm.kill()
        case "next-cannot-start":
            make = llm._engines[0].core._make  # type: ignore[attr-defined]

            def make_one_that_dies(epoch: int) -> InMemoryCoreClient:
                client: InMemoryCoreClient = make(epoch)
                client._outbox.clear()
                client.kill("it cannot start")
                return client

            llm._engines[0].core._make = make_one_that_dies  # type: ignore[attr-defined]
        case "sleep":
            nursery.start_soon(call, "sleep")
        case "wake":
            nursery.start_soon(call, "wake_up")
        case "drain" | "stall" | "resume":
            getattr(llm, step)()


def test_the_table_has_every_state() -> None:
    assert set(TRANSITIONS) == set(get_args(EngineState))


async def test_states_change_as_the_table_says_and_all_of_its_changes_happen(autojump_clock: MockClock) -> None:
    expected = {(state, target) for state, targets in TRANSITIONS.items() for target in targets}
    seen: set[tuple[EngineState, EngineState]] = set()
    for end in TRANSITIONS["loading"]:
        seen |= await tell_of_loading(end)
    for story in STORIES:
        changes = await tell(story)
        assert changes <= expected, (story, changes - expected)
        seen |= changes

    assert expected - seen == set()
