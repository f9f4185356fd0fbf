"""ControlClient: the part of `EngineClient` that controls running engines. The names are vLLM's.

No code: each call raises NotSupportedError unless a client implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trio_llm.errors import NotSupportedError

if TYPE_CHECKING:
    from trio_llm.wire.messages import PlainValue

__all__ = ["ControlClient"]


class ControlClient:
    """Control of running engines.

    Calls that change something are made one after the other, in the order in which they came, between two steps of the
    engine. Each is idempotent. A call that is cancelled before its turn is not made; later it is carried out all the
    same. Each raises EngineUnavailableError while the model loads, and EngineDeadError when the engine is gone.
    """

    async def sleep(self, level: int = 1) -> None:
        """Give back the memory of the KV cache, and the weights' memory on the device, until `wake_up`.

        Level 1 keeps the weights in host memory, level 2 drops them. Running requests wait, and are computed again from
        their first token on; new ones are refused with EngineUnavailableError.

        Raises:
            InvalidRequestError: there is no such level.
        """
        self._refuse("sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`: for `weights`, for `kv_cache`, or for both. Requests go on when both are awake.

        Weights that were dropped are read again from where they came from.

        Raises:
            InvalidRequestError: there is no such tag.
            EngineGenerateError: not enough memory, or the weights cannot be read: that part still sleeps.
        """
        self._refuse("wake_up")

    async def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        self._refuse("is_sleeping")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating until `resume_generation`. New requests are taken, and wait.

        Args:
            mode: `abort`: unfinished requests end, with that finish reason. `wait`: those that have begun go on, and
                this returns when they are over. `keep`: they stop where they are, and go on from there.
            clear_cache: no later request finds what was computed before.

        Cancellation: as above; once begun, the pause stays in force.

        Raises:
            InvalidRequestError: there is no such mode.
            EngineGenerateError: `wait`, and another call has undone the pause before those were over.
        """
        self._refuse("pause_generation")

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        self._refuse("resume_generation")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` is in force."""
        self._refuse("is_paused")

    async def reset_prefix_cache(self) -> None:
        """Let no later request find what was computed before."""
        self._refuse("reset_prefix_cache")

    async def collective_rpc(
        self,
        method: str,
        args: Sequence[PlainValue] = (),
        kwargs: Mapping[str, PlainValue] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method on every worker. Returns one answer per worker.

        The methods: `ping`, `memory_info` (bytes), `model_info`, `check_scheduler`, and `weights_checksum(prefix="")`,
        which is the same for workers that have the same weights, of those whose names begin with `prefix`.

        Args:
            args, kwargs: plain values.
            timeout_s: up to a day.

        Cancellation: the answer is dropped.

        Raises:
            InvalidRequestError: there is no such method (the text lists those there are), or it takes other arguments.
            EngineGenerateError: it failed.
            RequestTimeoutError: no answer came in time.
        """
        self._refuse("collective_rpc")

    async def start_profile(self) -> None:
        """Start the engine's profiler, unless it runs.

        Raises:
            NotSupportedError: there is no `profile_dir`, or nothing to profile.
        """
        self._refuse("start_profile")

    async def stop_profile(self) -> str | None:
        """Stop the engine's profiler. Returns the path of the trace, None if it did not run. Raises as `start_profile`,
        and EngineGenerateError if the trace cannot be written."""
        self._refuse("stop_profile")

    async def update_weights(
        self, path: str | None = None, *, version: str | None = None, update_info: Mapping[str, Any] | None = None
    ) -> None:
        """Compute all tokens from now on with other weights of the same architecture; or, with `update_info`, give some
        of the weights of the update that `start_weight_update` began.

        With a path: running requests go on, and their tokens so far are computed again; the prefix cache is emptied.
        All is checked before anything is changed. An update that was begun ends, and was for nothing.

        Args:
            path: a directory in Hugging Face form.
            version: what `RequestOutput.weight_version` says from now on; up to 256 characters.
            update_info: `{"files": [...]}`: names of safetensors files in the directory of
                `init_weight_transfer_engine`, with tensors as a checkpoint names them. They are read now, into host
                memory. A name that came before is read again. All tokens are computed with the old weights still.

        Raises:
            InvalidRequestError: there are no such weights or no such files, the weights sleep now, or no update was
                begun. Nothing has changed.
        """
        self._refuse("update_weights")

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Say where the files of weight updates are. An update that was begun ends, and was for nothing.

        Args:
            init_info: `{"directory": "..."}`.

        Raises:
            InvalidRequestError: there is no such directory.
        """
        self._refuse("init_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin an update whose weights come in several files, by `update_weights`. If one was begun, it begins anew.

        Raises:
            InvalidRequestError: there is no directory, since `init_weight_transfer_engine` was not called.
        """
        self._refuse("start_weight_update")

    async def finish_weight_update(self, *, weight_version: str) -> None:
        """Compute all tokens from now on with the weights of the update; what holds for `update_weights` with a path
        holds here.

        The files must have all weights together. They are read again if an engine is started again, or wakes up from
        level 2: keep them while these weights are served.

        Args:
            weight_version: as `update_weights`.

        Raises:
            InvalidRequestError: the files do not have the model's weights, the weights sleep now, or no update was
                begun. Nothing has changed, and an update that was begun can be completed.
        """
        self._refuse("finish_weight_update")

    async def add_lora(self, name: str, path: str) -> None:
        """Load an adapter."""
        self._refuse("add_lora")

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter."""
        self._refuse("remove_lora")

    async def list_loras(self) -> list[str]:
        """Names of the loaded adapters."""
        self._refuse("list_loras")

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter loaded."""
        self._refuse("pin_lora")

    def _refuse(self, method: str) -> NoReturn:
        raise NotSupportedError(f"{type(self).__name__} does not support {method}()")
