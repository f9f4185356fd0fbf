"""The watchdog: a dead engine stops the server, after a while, unless it is to stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.watchdog import GRACE_S, watch


class Server:
    """Notes when it was stopped, and holds a client whose engine can die."""

    def __init__(self, *, keep_alive: bool = False) -> None:
        self.stopped_at_s: float | None = None
        self.has_died = trio.Event()
        self.client = cast(
            EngineClient, SimpleNamespace(wait_dead=self._wait_dead, should_keep_api_server_alive=keep_alive)
        )

    def stop(self) -> None:
        self.stopped_at_s = trio.current_time()

    async def _wait_dead(self) -> EngineDeadError:
        await self.has_died.wait()
        return EngineDeadError("out of memory")


async def test_the_server_stops_when_the_grace_is_over(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, server.client, server.stop)
        await trio.sleep(100)
        assert server.stopped_at_s is None
        server.has_died.set()
        died_at_s = trio.current_time()

    assert server.stopped_at_s == died_at_s + GRACE_S
    assert "out of memory" in caplog.text


async def test_a_server_that_is_to_stay_is_not_stopped(autojump_clock: MockClock) -> None:
    server = Server(keep_alive=True)
    server.has_died.set()

    await watch(server.client, server.stop)
    await trio.sleep(10 * GRACE_S)

    assert server.stopped_at_s is None


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_cancelled_watchdog_stops_nothing(autojump_clock: MockClock, is_dead: bool) -> None:
    server = Server()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, server.client, server.stop)
        if is_dead:
            server.has_died.set()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await trio.sleep(10 * GRACE_S)

    assert server.stopped_at_s is None
