"""A control call that the engine does not answer: only those that move weights may take as long as a start."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_llm.errors import TrioLLMError
from trio_llm.testing import open_fake_llm

STALL_S = 20.0
STARTUP_S = 500.0

QUICK: dict[str, tuple[Any, ...]] = {
    "reset_prefix_cache": (),
    "pause_generation": (),
    "resume_generation": (),
    "collective_rpc": ("ping",),
}
SLOW: dict[str, tuple[Any, ...]] = {
    "sleep": (),
    "wake_up": (),
    "start_profile": (),
    "stop_profile": (),
    "update_weights": ("new",),
}


async def num_restarts_after(method: str, args: tuple[Any, ...], seconds: float) -> int:
    """How often an engine that hangs in a call of this method was started again by then."""
    async with (
        open_fake_llm(
            on_engine_death="restart", stall_timeout_s=STALL_S, startup_timeout_s=STARTUP_S, profile_dir="/tmp"
        ) as llm,
        trio.open_nursery() as nursery,
    ):

        async def call() -> None:
            with suppress(TrioLLMError):
                await getattr(llm, method)(*args, **({"version": "1"} if method == "update_weights" else {}))

        llm.stall()
        nursery.start_soon(call)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()
        return llm._engines[0].num_restarts


@pytest.mark.parametrize("method", QUICK)
async def test_an_engine_that_hangs_in_a_quick_call_is_found_as_ever(method: str, autojump_clock: MockClock) -> None:
    assert await num_restarts_after(method, QUICK[method], 3 * STALL_S) == 1


@pytest.mark.parametrize("method", SLOW)
async def test_one_that_may_move_weights_has_the_time_of_a_start(method: str, autojump_clock: MockClock) -> None:
    assert await num_restarts_after(method, SLOW[method], 3 * STALL_S) == 0
