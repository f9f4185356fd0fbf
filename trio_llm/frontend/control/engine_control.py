"""EngineControl: the calls that change running engines, one after the other.

One task makes the calls, in the nursery of `open_llm`, so that a caller who leaves does not leave an engine between two
states. Used by `AsyncLLM`, through `ControlCalls`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec
import trio

from trio_llm.errors import EngineDeadError, EngineGenerateError, EngineUnavailableError, TrioLLMError, fresh
from trio_llm.frontend.control.bring_back import bring_back
from trio_llm.frontend.control.engine import Engine, find_alive
from trio_llm.frontend.control.state import ControlState
from trio_llm.frontend.run_in_order import run_in_order
from trio_llm.wire.messages import PlainValue, UtilityValue

__all__ = ["Answer", "EngineControl", "MakeCall"]

logger = logging.getLogger(__name__)

Answer = UtilityValue
MakeCall = Callable[[str, tuple[PlainValue, ...]], Awaitable[list[Answer]]]
"""Makes one control call, of a method with arguments, on all engines, and keeps the states that they are in then."""

_CHANGES_STATE: Final = frozenset(
    {"sleep", "wake_up", "pause", "resume", "update_weights"}
    | {"init_weight_transfer_engine", "start_weight_update", "stage_weights"}
    | {"prepare_weight_update", "finish_weight_update"}
)
"""Methods that answer with the state that they leave."""
_MAY_BE_SILENT: Final = frozenset(
    {"sleep", "wake_up", "update_weights", "start_profile", "stop_profile"}
    | {"stage_weights", "prepare_weight_update", "finish_weight_update"}
)
"""Methods that may move or read weights, or write a trace: the engine may be silent for as long as a start takes. All
others are answered at once, or while steps go on, so that an engine which hangs in one of them is found as ever."""
_OPERATIONS: Final = {"sleep": "sleep", "wake_up": "wake"}
"""Methods that are observed, and what they are called then."""
_DESCRIBE: Final = "control_state"
"""The method that only answers with it."""
_EMPTY: Final = "reset_prefix_cache"
_BEGIN_PROFILE: Final = "start_profile"
_END_PROFILE: Final = "stop_profile"
_MAX_DEATHS: Final = 2
"""A call that so many incarnations died of is not made again."""


@dataclass(slots=True, eq=False)
class _Job:
    """One call, for all callers that want the same at the same time."""

    method: str
    args: tuple[PlainValue, ...]
    num_callers: int = 0
    has_begun: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    answers: list[Answer] = field(default_factory=list)
    """One per engine that is not dead for good."""
    error: TrioLLMError | None = None


class EngineControl:
    """Makes control calls in their order, each on all engines that are not dead for good; equal ones that wait next to
    each other are one call.

    Args:
        engines: at least one.
        check_ready: raises what stands against any call, such as a model that is still loading.
        make_call: makes each call, in place of this process. Raises as `call`.
    """

    def __init__(
        self, engines: Sequence[Engine], check_ready: Callable[[], None], *, make_call: MakeCall | None = None
    ) -> None:
        self._engines = engines
        self._check_ready = check_ready
        self._make_call = make_call or self._call_engines
        self._jobs: deque[_Job] = deque()
        """Not over, in order; the first may have begun."""
        self._waiting_for_jobs = trio.lowlevel.ParkingLot()
        self._is_over = False
        self.observe: Callable[[str, float | None], None] = _observe_nothing
        """Learns that an operation begins, and of its end with its duration in seconds. Set by the owner."""

    @property
    def state(self) -> ControlState:
        """What control calls have made of the engines. If a call has reached some of them only: of one that is held."""
        states = [engine.control_state for engine in find_alive(self._engines)]
        return next((state for state in states if state.is_held), states[0])

    def check_awake(self) -> None:
        """Raises:
        EngineUnavailableError: an engine sleeps.
        """
        state = self.state
        if state.is_asleep:
            raise EngineUnavailableError(f"the engine sleeps (level {state.sleep_level}); wake it up")

    async def run(self) -> None:
        """Make the calls. Returns never.

        Cancellation: all callers that wait get EngineDeadError.
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
                    job.error = _make_closed_error()
                job.done.set()
            self._jobs.clear()

    async def _make(self, job: _Job) -> None:
        operation, began_s = _OPERATIONS.get(job.method), trio.current_time()
        if operation:
            self.observe(operation, None)
        try:
            job.answers = await self._make_call(job.method, job.args)
        except TrioLLMError as error:
            job.error = error
        finally:
            if operation:
                self.observe(operation, trio.current_time() - began_s)

    async def _call_engines(self, method: str, args: tuple[PlainValue, ...]) -> list[Answer]:
        """Make a call on all engines. If one fails, all are brought back to where they were, or killed."""
        engines = find_alive(self._engines)
        states = [engine.control_state for engine in engines]
        results = await self._call_each(engines, method, args)
        failed = [
            engine for engine in engines if isinstance(results[engine.index], TrioLLMError) and not engine.is_dead
        ]
        if failed and method == _EMPTY and len(failed) < len(find_alive(engines)):
            for engine in failed:  # the cache of its next incarnation is empty, as that of the others now is
                engine.kill(f"its prefix cache could not be emptied: {results[engine.index]}")
                del results[engine.index]
        elif failed and method in _CHANGES_STATE:
            await self._bring_back(engines, states)
        elif failed and method == _BEGIN_PROFILE:
            await self._call_each([engine for engine in engines if engine not in failed], _END_PROFILE)
        answers = _take_answers(results)
        if method in _CHANGES_STATE:
            logger.info("%s: the engine is %s", method, self.state.describe())
        return answers

    async def _bring_back(self, engines: Sequence[Engine], states: Sequence[ControlState]) -> None:
        """A call has failed: half of what was asked for may be done, on any of the engines.

        A single engine stays where it is: then its state is known here, and no other one has to be like it.
        """
        await self._call_each(engines, _DESCRIBE)
        if len(find_alive(engines)) > 1:
            async with trio.open_nursery() as nursery:
                for engine, state in zip(engines, states, strict=True):
                    nursery.start_soon(bring_back, engine, state)

    async def _call_each(
        self, engines: Sequence[Engine], method: str, args: tuple[PlainValue, ...] = ()
    ) -> dict[int, Answer | TrioLLMError]:
        """Call a method of engines, all at the same time, and keep the states that they answer with. Returns what each
        answers, or why it does not, by its index.

        Cancellation: as `UtilityCalls.call`.
        """
        results: dict[int, Answer | TrioLLMError] = {}

        async def call(engine: Engine) -> None:
            num_silent = int(method in _MAY_BE_SILENT)
            engine.num_control_calls += num_silent
            try:
                answer = await engine.utilities.call(method, *args, max_deaths=_MAX_DEATHS)
                if method in _CHANGES_STATE or method == _DESCRIBE:
                    engine.control_state = _read(answer)
                results[engine.index] = answer
            except TrioLLMError as error:
                results[engine.index] = error
            finally:
                engine.num_control_calls -= num_silent

        if len(engines) == 1:
            await call(engines[0])
            return results
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(call, engine)
        return {engine.index: results[engine.index] for engine in engines}

    async def call(self, method: str, *args: PlainValue) -> list[Answer]:
        """Have a call made when those before it are over, and wait for its answers, one per engine.

        Cancellation: a call that has not begun, and that no other caller waits for, is not made. One that has begun is
        carried out by the engines all the same, and what it changes is known here.

        Raises: as `UtilityCalls.call`, and EngineUnavailableError while the model loads.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_ready()
        if self._is_over:
            raise _make_closed_error()
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
            raise fresh(job.error)
        return job.answers

    async def ask(
        self, method: str, *args: PlainValue, kwargs: Mapping[str, PlainValue] = MappingProxyType({})
    ) -> list[Answer]:
        """As `call`, for a method that changes nothing: it does not wait for the calls before it.

        Args:
            kwargs: arguments by name.

        Cancellation: the answers are dropped.
        """
        self._check_ready()

        async def call(engine: Engine) -> Answer | TrioLLMError:
            try:
                return await engine.utilities.call(method, *args, kwargs=kwargs)
            except EngineDeadError as error:
                return error

        engines = find_alive(self._engines)
        return _take_answers(dict(enumerate(await run_in_order(call, engines))))

    async def check_health(self) -> None:
        """Return if all engines that are up answer, or are busy and go on; see `Engine.check_health`.

        One that is started again, while others serve, is no reason to take no requests here.

        Cancellation: safe. Raises: as `Engine.check_health`, also if no engine is up.
        """
        engines = find_alive(self._engines)
        await run_in_order(Engine.check_health, [engine for engine in engines if engine.is_up] or engines)

    async def fetch_states(self) -> list[ControlState]:
        """What each engine says of itself now. Cancellation: safe. Raises: as `call`.

        Not kept: by the time that this task gets its turn, a call may have changed it.
        """
        return [_read(answer) for answer in await self.ask(_DESCRIBE)]


def _take_answers(results: Mapping[int, Answer | TrioLLMError]) -> list[Answer]:
    """The answers of the engines. One that has died for good meanwhile gives none.

    Raises:
        EngineDeadError: all engines are dead for good.
        TrioLLMError: the first engine's error if several have failed.
    """
    answers = [result for result in results.values() if not isinstance(result, TrioLLMError)]
    errors = [result for result in results.values() if isinstance(result, TrioLLMError)]
    others = [error for error in errors if not isinstance(error, EngineDeadError)]
    if others or not answers:
        raise (others or errors)[0]
    return answers


def _read(answer: Answer) -> ControlState:
    try:
        return msgspec.convert(answer, ControlState)
    except msgspec.ValidationError as error:
        raise EngineGenerateError(f"the engine described its state in a form that cannot be read: {error}") from error


def _observe_nothing(operation: str, seconds: float | None) -> None:
    """Until the owner sets another one."""


def _make_closed_error() -> EngineDeadError:
    return EngineDeadError("the block of open_llm() was left, and the engine with it")
