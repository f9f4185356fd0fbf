"""WeightStore: where the weights of a loaded model are, and which ones they are. Moves, drops and exchanges them.

Used by the torch executor, between steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from torch import Tensor

from trio_llm.engine.device import DeviceLostError, WeightsLocation
from trio_llm.engine.models.base import Model
from trio_llm.engine.worker.weight_files import StagedFiles, WeightFile, WeightSource
from trio_llm.errors import EngineStartupError, InvalidRequestError

__all__ = ["WeightStore"]


class WeightStore:
    """The weights of one model, by the names that the model gives them.

    What is no weight, such as the frequencies of rotary embeddings, stays on the device all the time.

    Args:
        source: directory that they were read from.
    """

    def __init__(self, model: Model, source: Path) -> None:
        self._model = model
        self._source: WeightSource = source
        self.staged: Final = StagedFiles(safetensors.torch.load)
        """Files of an update that is not complete."""
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

    def update(self, source: WeightSource) -> None:
        """Take other weights. Ours must be on the device. All is read and checked before any is changed.

        They are read into host memory and written in place.

        Raises:
            EngineStartupError: the source does not have the weights of this model; nothing has changed.
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

    def checksum(self, prefix: str) -> str:
        """BLAKE2b, 128 bits in hexadecimal, of the names and the content of all weights whose names begin so.

        Raises:
            InvalidRequestError: there are none, or they are dropped.
        """
        names = [name for name in sorted(self._model.weights) if name.startswith(prefix)]
        if not names:
            first = ", ".join(sorted(self._model.weights)[:3])
            raise InvalidRequestError(f"no weights have names that begin with {prefix[:100]!r}, as {first}", "prefix")
        if self._place is WeightsLocation.DROPPED:
            raise InvalidRequestError("the weights are dropped; call wake_up with the tag weights first")
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            digest.update(name.encode())
            digest.update(self._model.weights[name].detach().reshape(-1).view(torch.uint8).cpu().numpy())
        return digest.hexdigest()

    def _read(self, source: WeightSource) -> Mapping[str, Tensor]:
        """The weights of a source, which have our names and shapes."""
        if isinstance(source, Path):
            place, read = repr(str(source)), self._model.read_weights(source)
        else:
            place, read = "the files", self._model.read_weights(self._merge(source))
        shapes = {name: tuple(tensor.shape) for name, tensor in read.items()}
        for name in sorted(self._shapes.keys() | shapes.keys()):
            if (theirs := shapes.get(name)) != (ours := self._shapes.get(name)):
                raise EngineStartupError(f"the weights in {place} do not fit the model: {name} is {theirs}, not {ours}")
        return read

    def _merge(self, files: tuple[WeightFile, ...]) -> dict[str, Tensor]:
        """All tensors of the files, by the names that a checkpoint gives them."""
        merged: dict[str, Tensor] = {}
        for file, tensors in zip(files, self.staged.collect(files), strict=True):
            if twice := merged.keys() & tensors.keys():
                raise EngineStartupError(f"{min(twice)} is in {str(file.path)!r} and in a file before it")
            merged |= tensors
        return merged
