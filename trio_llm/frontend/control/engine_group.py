"""EngineGroup: all engines of one owner, the calls that change them, and the tasks that they need.

Owned by `AsyncLLM`, and with several front ends by the supervisor, which has no requests of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError
from trio_llm.frontend.control.engine import Engine, EngineListener, SupervisedEngine, find_alive
from trio_llm.frontend.control.engine_control import EngineControl, MakeCall
from trio_llm.frontend.control.status import EngineStatus, pick_best
from trio_llm.frontend.core_client.base import CoreClient

__all__ = ["EngineGroup"]


class EngineGroup:
    """One `Engine` per core client.

    Args:
        cores: the ways to the engines, at least one; all run the same model.
        check_ready: raises what stands against any control call, such as a model that is still loading.
        make_call: makes control calls in a supervisor, which owns the engines; None: this group owns them, and makes
            the calls.
    """

    def __init__(
        self,
        cores: Sequence[CoreClient],
        config: EngineConfig,
        check_ready: Callable[[], None],
        *,
        make_call: MakeCall | None = None,
    ) -> None:
        make_engine = Engine if make_call is None else SupervisedEngine
        self.engines = [make_engine(index, core, config) for index, core in enumerate(cores)]
        self.control = EngineControl(self.engines, check_ready, make_call=make_call)

    def listen(self, *listeners: EngineListener) -> None:
        """Say who learns of the engines' lives, in the order of the calls. Once, before `start`."""
        for engine in self.engines:
            engine.listeners = listeners

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engines are gone; None while any of them lives or is started again."""
        errors = [engine.monitor.dead_error for engine in self.engines]
        return None if None in errors else errors[0]

    @property
    def status(self) -> EngineStatus:
        """What the engines are together: as ready as the best of them, and asleep if a call has put them to sleep."""
        status = pick_best(engine.monitor.status() for engine in self.engines)
        control = self.control.state
        if status.state == "ready" and control.is_asleep:
            reason = f"it sleeps (level {control.sleep_level}); wake it up"
            return EngineStatus(state="asleep", elapsed_s=status.elapsed_s, reason=reason)
        return status

    def make_not_ready_error(self) -> Exception:
        """Why there is no loaded model now, to be raised."""
        return find_alive(self.engines)[0].monitor.not_ready()

    async def wait_dead(self) -> EngineDeadError:
        """Wait until all engines are dead for good. Cancellation: safe."""
        for engine in self.engines:
            await engine.monitor.wait_dead()
        assert self.dead_error is not None
        return self.dead_error

    def start(self, nursery: trio.Nursery, handle: Callable[[Engine], Awaitable[None]]) -> None:
        """Start the engines, and all tasks that belong to them, in `nursery`. Cancel it to stop the engines.

        Args:
            handle: takes the messages of one engine until it is dead for good.
        """
        for engine in self.engines:
            nursery.start_soon(engine.core.run)
            nursery.start_soon(handle, engine)
            nursery.start_soon(engine.monitor.watch)
        nursery.start_soon(self.control.run)

    def close(self, error: EngineDeadError) -> None:
        """Nothing follows for callers that wait: they get `error`. Synchronous."""
        for engine in self.engines:
            engine.close(error)
