"""WeightStore: where the weights of a loaded model are, and which. Moves them, drops them, reads them and others again.

Used by the torch executor, between steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trio_llm.engine.device import DeviceLostError, WeightsLocation
from trio_llm.engine.models.causal_lm import CausalLM, read_config
from trio_llm.engine.models.load import load_model
from trio_llm.errors import EngineStartupError

__all__ = ["WeightStore"]

_NO_MATTER: Final = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
"""Fields of a configuration in which two that compute the same may differ."""


class WeightStore:
    """The weights of one model.

    Small buffers, such as the frequencies of rotary embeddings, stay on the device all the time.

    Args:
        source: directory that they were read from.
    """

    def __init__(self, model: CausalLM, source: Path) -> None:
        self._module: nn.Module = model.module
        self._device = model.device
        self._dtype: Any = str(model.kv_shape.dtype).removeprefix("torch.")
        self._source = source
        self._config = _plain(read_config(source))
        self._place = WeightsLocation.DEVICE
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._module.state_dict().items()}

    def sizes_bytes(self) -> dict[str, int]:
        """What the weights take, on the device and in host memory."""
        size = sum(parameter.nbytes for parameter in self._module.parameters())
        on_device = self._place is WeightsLocation.DEVICE
        return {"weights_device_bytes": size if on_device else 0, "weights_host_bytes": 0 if on_device else size}

    def move(self, place: WeightsLocation) -> None:
        """Put them there. All or nothing.

        Raises:
            EngineStartupError: they were dropped and cannot be read again.
            Exception: not enough memory.
        """
        if place is self._place:
            return
        parameters = dict(self._module.named_parameters())
        moved: dict[str, Tensor]
        if place is WeightsLocation.DROPPED:
            moved = {name: parameter.data.new_empty(0) for name, parameter in parameters.items()}
        elif self._place is WeightsLocation.DROPPED:
            state = self._read(self._source)
            moved = {name: state[name].to(self._device) for name in parameters}
        else:
            target = self._device if place is WeightsLocation.DEVICE else torch.device("cpu")
            moved = {name: parameter.data.to(target) for name, parameter in parameters.items()}
        # Only now, when nothing can fail any more. Tied weights are one parameter, and stay so.
        for name, parameter in parameters.items():
            parameter.data = moved[name]
        self._place = place

    def update(self, source: Path) -> None:
        """Take those of another directory, which must be on the device. All is read and checked before one is changed.

        They are read into host memory, beside those that are there, and written in place.

        Raises:
            EngineStartupError: the directory does not have the weights of such a model; nothing has changed.
            DeviceLostError: writing them failed.
        """
        assert self._place is WeightsLocation.DEVICE, "weights that are asleep cannot be updated"
        state = self._read(source)
        try:
            with torch.no_grad():
                for name, tensor in self._module.state_dict().items():
                    tensor.copy_(state[name])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:
            raise DeviceLostError(f"writing new weights failed half-way: {type(error).__name__}: {error}") from error
        self._source = source

    def _read(self, source: Path) -> dict[str, Tensor]:
        """All tensors of a directory, on the host, in the model's dtype; they fit the model."""
        # Before anything is read: the weights of another model may be more than there is memory for.
        if difference := _find_difference(self._config, _plain(read_config(source))):
            raise EngineStartupError(
                f"the model in {str(source)!r} is another one than the one that is served: {difference}"
            )
        _check_index(source)
        module = load_model(source, dtype=self._dtype, device=torch.device("cpu")).module
        state: dict[str, Tensor] = module.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if difference := _find_difference(self._shapes, shapes):
            raise EngineStartupError(f"the weights in {str(source)!r} do not fit the model: {difference}")
        return state


def _check_index(source: Path) -> None:
    """The index of weights in several files names files beside it, and no others: whoever names the directory must not
    reach what lies elsewhere."""
    index = source / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        strange = sorted(name for name in names if Path(name).name != name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineStartupError(f"cannot read {str(index)!r}: {type(error).__name__}") from error
    if strange:
        raise EngineStartupError(f"{str(index)!r} names a file that is not beside it: {strange[0][:100]!r}")


def _plain(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()
    return fields


def _find_difference(ours: dict[Any, Any], theirs: dict[Any, Any]) -> str | None:
    """The first field in which they differ, in words. Some tables in configurations have numbers for keys."""
    for name in sorted(ours.keys() | theirs.keys(), key=str):
        if str(name).startswith("_") or name in _NO_MATTER:
            continue
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            if difference := _find_difference(mine, other):
                return f"{name}.{difference}"
        elif mine != other:
            return f"{name} is {str(other)[:100]}, not {str(mine)[:100]}"
    return None
