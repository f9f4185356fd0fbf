"""ControlCalls: the calls of `EngineClient` that change running engines, for a client that has an `EngineControl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from trio_llm.config import DAY_S
from trio_llm.errors import EngineGenerateError, InvalidRequestError, RequestTimeoutError
from trio_llm.frontend.control.engine_control import EngineControl
from trio_llm.quoting import quote
from trio_llm.wire.messages import PlainValue

__all__ = ["ControlCalls"]


class ControlCalls:
    """The control calls of `EngineClient`, which has their contracts, for a client that has an `EngineControl`."""

    _control: EngineControl

    async def sleep(self, level: int = 1) -> None:
        await self._control.call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if isinstance(tags, str):
            raise InvalidRequestError("tags must be a list of strings", "tags")
        await self._control.call("wake_up", *(tags or ()))

    async def is_sleeping(self) -> bool:
        return any(state.is_asleep for state in await self._control.fetch_states())

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if not isinstance(clear_cache, bool):
            raise InvalidRequestError("clear_cache must be true or false", "clear_cache")
        await self._control.call("pause", mode, clear_cache)
        if mode == "wait" and not all(await self._control.ask("wait_paused")):
            raise EngineGenerateError("the pause was undone before the running requests had finished")

    async def resume_generation(self) -> None:
        await self._control.call("resume")

    async def is_paused(self) -> bool:
        return any(state.pause != "running" for state in await self._control.fetch_states())

    async def reset_prefix_cache(self) -> None:
        await self._control.call("reset_prefix_cache")

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[PlainValue] = (),
        kwargs: Mapping[str, PlainValue] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        kwargs = {} if kwargs is None else kwargs
        for name, values in (("args", list(args)), ("kwargs", [*kwargs.values()])):
            if others := [value for value in values if not isinstance(value, PlainValue)]:
                raise InvalidRequestError(f"{name} must be plain values, not {type(others[0]).__name__}", name)
        if timeout_s is not None and not 0 < timeout_s <= DAY_S:
            raise InvalidRequestError(
                f"timeout must be above 0 and up to {DAY_S} seconds, not {quote(timeout_s)}", "timeout"
            )
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            return await self._control.ask("collective_rpc", method, *args, kwargs=kwargs)
        raise RequestTimeoutError(f"the worker has not answered {method[:100]!r} within {timeout_s:g} seconds")

    async def check_scheduler(self) -> dict[str, int]:
        """Let the engines assert their schedulers' invariants, and return the sums of their counts.

        Cancellation: safe.

        Raises:
            EngineGenerateError: an invariant does not hold.
            EngineUnavailableError: the model is still loading.
            EngineDeadError: the engine is gone.
        """
        sums: dict[str, int] = {}
        for counts in await self._control.ask("check_scheduler"):
            if not isinstance(counts, dict):
                raise EngineGenerateError(f"the engine answered check_scheduler with {counts!r}")
            for name, value in counts.items():
                assert isinstance(value, int)
                sums[name] = sums.get(name, 0) + value
        return sums

    async def start_profile(self) -> None:
        await self._control.call("start_profile")

    async def stop_profile(self) -> str | None:
        paths = [str(path) for path in await self._control.call("stop_profile") if path is not None]
        return ", ".join(paths) or None

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        directory = _only_field(init_info, "init_info", "directory")
        await self._control.call("init_weight_transfer_engine", directory)

    async def start_weight_update(self) -> None:
        await self._control.call("start_weight_update")

    async def update_weights(
        self, path: str | None = None, *, version: str | None = None, update_info: Mapping[str, Any] | None = None
    ) -> None:
        if update_info is None:
            await self._control.call("update_weights", path, version)
            return
        if path is not None or version is not None:
            raise InvalidRequestError("update_info goes without path and version", "update_info")
        files = _only_field(update_info, "update_info", "files")
        if not isinstance(files, list | tuple) or not all(isinstance(file, str) for file in files):
            raise InvalidRequestError("update_info.files must be a list of strings", "update_info.files")
        await self._control.call("stage_weights", *files)

    async def finish_weight_update(self, *, weight_version: str) -> None:
        await self._control.call("prepare_weight_update")
        if len({state.update_files for state in await self._control.fetch_states()}) > 1:
            raise InvalidRequestError(
                "the engines have read different files, since some were written meanwhile; send those again",
                "update_info.files",
            )
        await self._control.call("finish_weight_update", weight_version)


def _only_field(info: Mapping[str, Any], name: str, field: str) -> Any:
    """The value of an object's one field.

    Raises:
        InvalidRequestError: it has other fields.
    """
    if not isinstance(info, Mapping) or set(info) != {field}:
        raise InvalidRequestError(f"{name} must be an object with the one field {field}", name)
    return info[field]
