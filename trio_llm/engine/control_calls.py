"""ControlCalls: the table of methods that clients may call by name, with plain values as arguments.

Owned by EngineCore, which retires all steps in flight before a method of `BETWEEN_STEPS`. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Final, get_args

from trio_llm.engine.device import DeviceLostError
from trio_llm.engine.engine_state import PARTS, EngineControlState, Pause, PauseEvent, SleepEvent
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.weight_transfer import WeightTransfer
from trio_llm.errors import EngineStartupError, InvalidRequestError, NotSupportedError
from trio_llm.wire.messages import EngineCoreOutput, PlainValue, StateValue, UtilityCall, UtilityResult, UtilityValue

__all__ = ["BETWEEN_STEPS", "ControlCalls"]

BETWEEN_STEPS: Final = frozenset(
    {"sleep", "wake_up", "pause", "resume", "start_profile"}
    | {"update_weights", "finish_weight_update", "restore_weights"}
)
"""Methods that are called only while no step is in flight."""


class ControlCalls:
    """Carries out calls, one at a time, and keeps the control state.

    Args:
        num_sent: returns the number of messages that a client was sent so far.
        profile_dir: folder for profiles; None: profiling is refused.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, *, num_sent: Callable[[int], int], profile_dir: str | None
    ) -> None:
        self.state = EngineControlState()
        self._executor = executor
        self._scheduler = scheduler
        self._num_sent = num_sent
        self._profile_dir = profile_dir
        self._rows: list[EngineCoreOutput] = []
        self._caller = 0
        """Index of the client whose call is carried out."""
        self._waiting_for_end: list[tuple[int, int]] = []
        """Client and id of calls of `wait_paused`: answered when all requests that had begun are finished, or when the
        pause ends."""
        self._clears_at_end = False
        transfer = WeightTransfer(executor, scheduler, self.state)
        self._methods: Final[dict[str, Callable[..., UtilityValue]]] = {
            "ping": self._ping,
            "check_scheduler": self._check_scheduler,
            "control_state": self._describe,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "pause": self._pause,
            "resume": self._resume,
            "reset_prefix_cache": self._reset_prefix_cache,
            "update_weights": transfer.update,
            "init_weight_transfer_engine": transfer.init,
            "start_weight_update": transfer.start,
            "stage_weights": transfer.stage,
            "prepare_weight_update": transfer.prepare,
            "finish_weight_update": transfer.finish,
            "restore_weights": transfer.restore_weights,
            "restore_weight_update": transfer.restore_update,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "collective_rpc": self._collective_rpc,
        }
        self._worker_methods: Final[dict[str, Callable[..., UtilityValue]]] = {
            "ping": self._ping,
            "check_scheduler": self._check_scheduler,
            "memory_info": self._memory_info,
            "model_info": self._model_info,
            "weights_checksum": self._weights_checksum,
        }
        """Methods that `collective_rpc` may name. They change nothing."""

    def call(self, call: UtilityCall, client_index: int) -> list[tuple[int, UtilityResult]]:
        """Carry out a call of a client.

        Returns:
            Its answer, and answers of earlier calls that it has made due, each with the client that called.

        Raises:
            DeviceLostError: the engine cannot go on. All other errors are the answer of the call.
        """
        if call.method == "wait_paused":
            self._waiting_for_end.append((client_index, call.call_id))
            return self.settle()
        self._caller = client_index
        return [(client_index, self._answer(call)), *self.settle()]

    def forget_client(self, client_index: int) -> None:
        """A client is gone: its calls need no answer."""
        self._waiting_for_end = [waiting for waiting in self._waiting_for_end if waiting[0] != client_index]

    def settle(self) -> list[tuple[int, UtilityResult]]:
        """The answers of `wait_paused` that are due. To be called before and after each step.

        The value is true if all requests that had begun are finished, and false if the pause ended before.
        """
        if not (self._waiting_for_end or self._clears_at_end):
            return []
        is_finished = not self._scheduler.has_begun
        if self.state.pause is Pause.WAIT and not is_finished:
            return []
        if self.state.pause is Pause.WAIT and self._clears_at_end:
            self._scheduler.reset_prefix_cache()
        self._clears_at_end = False
        due, self._waiting_for_end = self._waiting_for_end, []
        return [(client_index, UtilityResult(call_id, value=is_finished)) for client_index, call_id in due]

    def take_rows(self) -> list[EngineCoreOutput]:
        """Take the last rows of requests that calls have ended."""
        rows, self._rows = self._rows, []
        return rows

    def _answer(self, call: UtilityCall) -> UtilityResult:
        method = self._methods.get(call.method)
        if method is None:
            return UtilityResult(call.call_id, error=f"the engine has no method {call.method[:100]!r}")
        try:
            return UtilityResult(call.call_id, value=method(*call.args, **call.kwargs))
        except DeviceLostError:
            raise
        except InvalidRequestError as error:
            return UtilityResult(call.call_id, error=str(error), error_kind="invalid", error_param=error.param)
        except NotSupportedError as error:
            return UtilityResult(call.call_id, error=str(error), error_kind="unsupported")
        except EngineStartupError as error:  # no memory for a cache, or weight files are missing
            return UtilityResult(call.call_id, error=str(error))
        except Exception as error:  # wrong arguments, or the method failed: the engine goes on
            return UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------- questions

    def _ping(self) -> int:
        """Answered by the loop, so it shows that the loop turns. The value is the number of messages to the caller so
        far."""
        return self._num_sent(self._caller)

    def _check_scheduler(self) -> dict[str, StateValue]:
        """Assert the scheduler's invariants and return its counts."""
        self._scheduler.check()
        stats = self._scheduler.stats()
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_free_blocks": stats.num_free_blocks,
            "num_blocks": stats.num_blocks,
        }

    def _describe(self) -> dict[str, StateValue]:
        return self.state.describe()

    def _memory_info(self) -> dict[str, StateValue]:
        return {**self._executor.memory_info()}

    def _model_info(self) -> dict[str, StateValue]:
        info = self._executor.info
        return {
            "model_dir": info.model_dir,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.max_model_len,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "weight_version": self.state.weight_version,
            **info.versions,
        }

    def _weights_checksum(self, prefix: PlainValue = "") -> str:
        """The same for two workers only if they have the same weights, of those whose names begin so."""
        if not isinstance(prefix, str):
            raise InvalidRequestError("prefix must be a string", "prefix")
        return self._executor.weights_checksum(prefix)

    def _collective_rpc(self, name: PlainValue, /, *args: PlainValue, **kwargs: PlainValue) -> UtilityValue:
        method = self._worker_methods.get(name) if isinstance(name, str) else None
        if method is None:
            known = ", ".join(sorted(self._worker_methods))
            raise InvalidRequestError(f"the workers have no method {str(name)[:100]!r}; use one of {known}", "method")
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidRequestError(f"{name}: {error}", "kwargs" if kwargs else "args") from error
        return method(*args, **kwargs)

    # -------------------------------------------------------------------------------------- changes

    def _sleep(self, level: PlainValue) -> dict[str, StateValue]:
        if isinstance(level, bool) or level not in (1, 2):
            raise InvalidRequestError(f"the sleep level must be 1 or 2, not {level!r}", "level")
        event: SleepEvent = "sleep 1" if level == 1 else "sleep 2"
        if self.state.sleep_state_after(event) is not self.state.sleep_state:
            # The blocks of running sequences lose their content.
            self._scheduler.preempt_all()
            self._change_sleep_state(event)
        return self.state.describe()

    def _wake_up(self, *parts: PlainValue) -> dict[str, StateValue]:
        if unknown := [part for part in parts if part not in PARTS]:
            raise InvalidRequestError(f"tags must be of {', '.join(PARTS)}, not {unknown[0]!r}", "tags")
        events: dict[str, SleepEvent] = {"weights": "wake weights", "kv_cache": "wake kv_cache"}
        for part in PARTS:
            # One after the other, so that the state is true even if the second one fails.
            if part in (parts or PARTS):
                self._change_sleep_state(events[part])
        return self.state.describe()

    def _change_sleep_state(self, event: SleepEvent) -> None:
        sleep_state = self.state.sleep_state_after(event)
        if sleep_state is not self.state.sleep_state:
            self._executor.move(sleep_state.weights, has_cache=sleep_state.has_cache)
            self.state.sleep_state = sleep_state

    def _pause(self, mode: PlainValue, clears_cache: PlainValue) -> dict[str, StateValue]:
        events: dict[PlainValue, PauseEvent] = {
            event.removeprefix("pause "): event for event in get_args(PauseEvent) if event.startswith("pause ")
        }
        if mode not in events:
            raise InvalidRequestError(f"mode must be one of {', '.join(map(str, events))}, not {mode!r}", "mode")
        self._change_pause(events[mode])
        if mode == "abort":
            self._rows += self._scheduler.abort_all()
        if mode == "wait":
            self._clears_at_end = bool(clears_cache)
        elif clears_cache:
            self._scheduler.reset_prefix_cache()
        return self.state.describe()

    def _resume(self) -> dict[str, StateValue]:
        self._change_pause("resume")
        return self.state.describe()

    def _change_pause(self, event: PauseEvent) -> None:
        self.state.pause = self.state.pause_after(event)
        self._scheduler.admits_new = self.state.admits_new

    def _reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def _start_profile(self) -> None:
        if self._profile_dir is None:
            raise NotSupportedError("there is no folder for profiles; start the engine with --profile-dir")
        self._executor.start_profile(Path(self._profile_dir))

    def _stop_profile(self) -> str | None:
        return self._executor.stop_profile()
