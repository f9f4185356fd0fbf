"""WeightStore: where the weights of a loaded model are, and which ones they are. Moves, drops and exchanges them.

Used by the torch executor, between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trio_llm.engine.device import DeviceLostError, WeightsLocation
from trio_llm.engine.models.base import Model
from trio_llm.errors import EngineStartupError

__all__ = ["WeightStore"]


class WeightStore:
    """The weights of one model, by the names that the model gives them.

    What is no weight, such as the frequencies of rotary embeddings, stays on the device all the time.

    Args:
        source: directory that they were read from.
    """

    def __init__(self, model: Model, source: Path) -> None:
        self._model = model
        self._source = source
        self._place = WeightsLocation.DEVICE
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.weights.items()}

    def sizes_bytes(self) -> dict[str, int]:
        """What the weights take, on the device and in host memory."""
        size = sum(tensor.nbytes for tensor in self._model.weights.values())
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
        weights = self._model.weights
        moved: dict[str, Tensor]
        if place is WeightsLocation.DROPPED:
            moved = {name: tensor.data.new_empty(0) for name, tensor in weights.items()}
        elif self._place is WeightsLocation.DROPPED:
            read = self._read(self._source)
            moved = {name: read[name].data.to(self._model.device) for name in weights}
        else:
            target = self._model.device if place is WeightsLocation.DEVICE else torch.device("cpu")
            moved = {name: tensor.data.to(target) for name, tensor in weights.items()}
        for name, tensor in weights.items():  # only now, when nothing can fail any more
            tensor.data = moved[name]
        self._place = place

    def update(self, source: Path) -> None:
        """Take the weights of another directory. Ours must be on the device. All is read and checked before any is
        changed.

        They are read into host memory and written in place.

        Raises:
            EngineStartupError: the directory does not have the weights of this model; nothing has changed.
            DeviceLostError: writing them failed.
        """
        assert self._place is WeightsLocation.DEVICE, "weights that are asleep cannot be updated"
        read = self._read(source)
        try:
            with torch.no_grad():
                for name, tensor in self._model.weights.items():
                    tensor.copy_(read[name])
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        except Exception as error:
            raise DeviceLostError(f"writing new weights failed half-way: {type(error).__name__}: {error}") from error
        self._source = source

    def _read(self, source: Path) -> Mapping[str, Tensor]:
        """The weights in a directory, which have our names and shapes."""
        read = self._model.read_weights(source)
        shapes = {name: tuple(tensor.shape) for name, tensor in read.items()}
        for name in sorted(self._shapes.keys() | shapes.keys()):
            if (theirs := shapes.get(name)) != (ours := self._shapes.get(name)):
                raise EngineStartupError(
                    f"the weights in {str(source)!r} do not fit the model: {name} is {theirs}, not {ours}"
                )
        return read
