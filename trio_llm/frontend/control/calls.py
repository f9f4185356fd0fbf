"""EngineControl: the calls that change a running engine, one after the other. ControlCalls: their names for users.

One task makes the calls, in the nursery of `open_llm`, so that a caller who leaves does not leave the engine between
two states. Used by `AsyncLLM`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio

from trio_llm.config import DAY_S
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestTimeoutError,
    TrioLLMError,
)
from trio_llm.frontend.control.state import ControlState
from trio_llm.frontend.control.utility_calls import UtilityCalls
from trio_llm.quoting import quote
from trio_llm.wire.messages import PlainValue, UtilityCall

__all__ = ["ControlCalls", "EngineControl"]

logger = logging.getLogger(__name__)

_Answer = PlainValue | Sequence[PlainValue] | Mapping[str, PlainValue]

_CHANGES_STATE: Final = frozenset({"sleep", "wake_up", "pause", "resume", "update_weights"})
"""Methods that answer with the state that they leave."""
_MAX_DEATHS: Final = 2
"""A call that so many engines died of is not made again."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call, for all who want the same at the same time."""

    method: str
    args: tuple[PlainValue, ...]
    num_callers: int = 0
    has_begun: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    answer: _Answer = None
    error: TrioLLMError | None = None


class EngineControl:
    """Makes control calls in their order; equal ones that wait next to each other are one call.

    Args:
        utilities: the way to the engine.
        check_ready: raises what stands against any call, such as a model that is still loading.
    """

    def __init__(self, utilities: UtilityCalls, check_ready: Callable[[], None]) -> None:
        self.state = ControlState()
        self._utilities = utilities
        self._check_ready = check_ready
        self._jobs: deque[_Job] = deque()
        """Not over, in order; the first may have begun."""
        self._num_replayed = 0
        """Calls of the newest replay that are not answered."""
        self._waiting_for_jobs = trio.lowlevel.ParkingLot()
        self._is_over = False

    def replay(self) -> list[UtilityCall]:
        """What brings a fresh engine to where this one was: see `ControlState.replay`."""
        calls = self.state.replay()
        self._num_replayed = len(calls)
        return calls

    def has_replayed(self) -> None:
        """The engine has answered one of them."""
        self._num_replayed -= 1

    @property
    def is_under_way(self) -> bool:
        """A call is being made, a replayed one also, which may take the engine long, and its loop with it."""
        return self._num_replayed > 0 or (bool(self._jobs) and self._jobs[0].has_begun)

    def check_awake(self) -> None:
        """Raises:
        EngineUnavailableError: the engine sleeps.
        """
        if self.state.is_asleep:
            raise EngineUnavailableError(f"the engine sleeps (level {self.state.sleep_level}); wake it up")

    async def run(self) -> None:
        """Make the calls. Returns never.

        Cancellation: whoever waits gets EngineDeadError.
        """
        try:
            while True:
                while not self._jobs:
                    await self._waiting_for_jobs.park()
                job = self._jobs[0]
                if job.num_callers:
                    job.has_begun = True
                    await self._make(job)
                self._jobs.popleft()
                job.done.set()
        finally:
            self._is_over = True
            for job in self._jobs:
                if job.error is None:
                    job.error = _left()
                job.done.set()
            self._jobs.clear()

    async def _make(self, job: _Job) -> None:
        try:
            job.answer = await self._utilities.call(job.method, *job.args, max_deaths=_MAX_DEATHS)
            if job.method in _CHANGES_STATE:
                self.state = _read(job.answer)
                logger.info("%s: the engine is %s", job.method, self.state.describe())
        except TrioLLMError as error:
            job.error = error
            # Half of what was asked for may be done.
            if job.method in _CHANGES_STATE and not isinstance(error, EngineDeadError):
                await self._ask_state()

    async def _ask_state(self) -> None:
        with suppress(TrioLLMError):  # whoever calls next is told
            self.state = _read(await self._utilities.call("control_state"))

    async def call(self, method: str, *args: PlainValue) -> _Answer:
        """Have a call made when those before it are over, and wait for its answer.

        Cancellation: a call that has not begun, and that nobody else waits for, is not made. One that has begun is
        carried out by the engine all the same, and what it changes is known here.

        Raises: as `UtilityCalls.call`, and EngineUnavailableError while the model loads.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_ready()
        if self._is_over:
            raise _left()
        job = self._jobs[-1] if self._jobs else None
        if job is None or job.has_begun or (job.method, job.args) != (method, args):
            job = _Job(method, args)
            self._jobs.append(job)
            self._waiting_for_jobs.unpark()
        job.num_callers += 1
        try:
            await job.done.wait()
        finally:
            job.num_callers -= 1
        if job.error is not None:
            # One exception object must not be raised in many tasks: each would add its own traceback.
            raise copy.copy(job.error)
        return job.answer

    async def ask(self, method: str, *args: PlainValue) -> _Answer:
        """As `call`, for a method that changes nothing: it does not wait for the calls before it.

        Cancellation: the answer is dropped.
        """
        self._check_ready()
        return await self._utilities.call(method, *args)

    async def fetch_state(self) -> ControlState:
        """What the engine says of itself now. Cancellation: safe. Raises: as `call`.

        Not kept as `state`: by the time that this task gets its turn, a call may have changed it.
        """
        return _read(await self.ask("control_state"))


class ControlCalls:
    """The control calls of `EngineClient`, for a client that has an `EngineControl`."""

    _control: EngineControl

    async def sleep(self, level: int = 1) -> None:
        await self._control.call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if isinstance(tags, str):
            raise InvalidRequestError("tags must be a list of strings", "tags")
        await self._control.call("wake_up", *(tags or ()))

    async def is_sleeping(self) -> bool:
        return (await self._control.fetch_state()).is_asleep

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if not isinstance(clear_cache, bool):
            raise InvalidRequestError("clear_cache must be true or false", "clear_cache")
        await self._control.call("pause", mode, clear_cache)
        if mode == "wait" and not await self._control.ask("wait_paused"):
            raise EngineGenerateError("the pause was undone before the running requests had finished")

    async def resume_generation(self) -> None:
        await self._control.call("resume")

    async def is_paused(self) -> bool:
        return (await self._control.fetch_state()).pause != "running"

    async def reset_prefix_cache(self) -> None:
        await self._control.call("reset_prefix_cache")

    async def collective_rpc(
        self, method: str, args: Sequence[PlainValue] = (), *, timeout_s: float | None = None
    ) -> list[Any]:
        if strange := [one for one in args if not isinstance(one, PlainValue)]:
            raise InvalidRequestError(f"args must be plain values, not {type(strange[0]).__name__}", "args")
        if timeout_s is not None and not 0 < timeout_s <= DAY_S:
            raise InvalidRequestError(
                f"timeout must be above 0 and up to {DAY_S} seconds, not {quote(timeout_s)}", "timeout"
            )
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            return [await self._control.ask("collective_rpc", method, *args)]
        raise RequestTimeoutError(f"the worker has not answered {method[:100]!r} within {timeout_s:g} seconds")

    async def start_profile(self) -> None:
        await self._control.call("start_profile")

    async def stop_profile(self) -> str | None:
        path = await self._control.call("stop_profile")
        return None if path is None else str(path)

    async def update_weights(self, path: str, *, version: str) -> None:
        await self._control.call("update_weights", path, version)


def _read(answer: _Answer) -> ControlState:
    try:
        return msgspec.convert(answer, ControlState)
    except msgspec.ValidationError as error:
        raise EngineGenerateError(f"the engine told of its state what cannot be read: {error}") from error


def _left() -> EngineDeadError:
    return EngineDeadError("the block of open_llm() was left, and the engine with it")
