"""RestartingClient: a core client that starts another incarnation of an engine when one dies.

The registry of requests sends the unfinished ones to the next incarnation. Used by `open_llm`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from trio_llm.errors import EngineDeadError, EngineStartupError
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.wire.messages import FromEngine, Ready, ToEngine

__all__ = ["RestartingClient"]

logger = logging.getLogger(__name__)


class RestartingClient:
    """Implements `CoreClient`. An engine that dies before it was ever ready is not started again: it would die again.
    Nor is one that is killed for good.

    Args:
        make: the client of one incarnation, which counts from 1.
        policy: decides about each death.

    Raises:
        EngineStartupError: as `make`, for the first one.
    """

    def __init__(self, make: Callable[[int], CoreClient], policy: RestartPolicy) -> None:
        self._make = make
        self._policy = policy
        self._epoch = 1
        self._client = make(self._epoch)
        self._life = trio.CancelScope()
        """The scope of the present incarnation's `run`."""
        self._was_ready = False
        """Whether any incarnation was ready."""
        self._last_reason: str | None = None
        """Why no other incarnation may follow; None: one may."""
        self._delay_s = 0.0
        self._is_lost = trio.Event()
        self._is_started = trio.Event()
        self._is_started.set()

    @property
    def current(self) -> CoreClient:
        """The newest incarnation's client."""
        return self._client

    async def run(self) -> None:
        """As `CoreClient.run`."""
        while True:
            with self._life:
                try:
                    await self._client.run()
                except EngineStartupError:
                    if self._epoch == 1:
                        raise
                    # `receive` gets the error, too, and decides.
            await self._is_lost.wait()
            await trio.sleep(self._delay_s)
            self._epoch += 1
            self._life = trio.CancelScope()
            self._is_lost = trio.Event()
            self._client = self._make_next()
            self._is_started.set()

    def _make_next(self) -> CoreClient:
        if self._last_reason is not None:  # `kill` came while no incarnation ran
            return _NeverStarted(self._last_reason)
        try:
            return self._make(self._epoch)
        except EngineStartupError as error:
            return _NeverStarted(str(error))

    def send_nowait(self, message: ToEngine) -> None:
        self._client.send_nowait(message)

    async def receive(self) -> Sequence[FromEngine | EngineLost]:
        """As `CoreClient.receive`. A death is the message `EngineLost` if another incarnation follows.

        Cancellation: safe; nothing was taken.
        """
        if not self._is_started.is_set():
            await self._is_started.wait()
        try:
            messages = await self._client.receive()
        except EngineDeadError as error:
            return [self._plan_restart(str(error))]
        if not self._was_ready:
            self._was_ready = any(isinstance(message, Ready) for message in messages)
        return messages

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        if for_good and self._last_reason is None:
            self._last_reason = reason
        self._client.kill(reason)

    def _plan_restart(self, reason: str) -> EngineLost:
        if self._last_reason is not None or not self._was_ready:
            raise EngineDeadError(reason)
        delay_s = self._policy.next_delay_s(trio.current_time())
        if delay_s is None:
            limit = self._policy.max_restarts
            raise EngineDeadError(
                f"{reason}; it was started again {limit} times within ten minutes, which is the limit "
                "(--max-engine-restarts)"
                if limit
                else f"{reason}; it is not started again (--max-engine-restarts 0)"
            )
        logger.warning("the engine is dead and is started again in %g s: %s", delay_s, reason)
        self._delay_s = delay_s
        self._is_started = trio.Event()
        self._is_lost.set()
        self._life.cancel()
        return EngineLost(self._epoch, reason)


class _NeverStarted:
    """The client of an incarnation that could not be started: dead from the beginning."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def run(self) -> None:
        await trio.sleep_forever()

    def send_nowait(self, message: ToEngine) -> None:
        pass

    async def receive(self) -> Sequence[FromEngine | EngineLost]:
        await trio.lowlevel.checkpoint()
        raise EngineDeadError(self._reason)

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        pass
