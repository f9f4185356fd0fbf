"""Read a GGUF file: its metadata and its tensors, every offset and size checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). Block
layouts: ggml's `block_q8_0` and `block_q4_1`. Used by the conversion of the embedded model.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GgufError", "GgufFile", "TensorInfo"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_LAYOUT = {_F32: (1, 4), _F16: (1, 2), _Q4_1: (32, 20), _Q8_0: (32, 34)}
"""Type of a tensor: numbers in a block, bytes of a block."""
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 2


class GgufError(ValueError):
    """The file is damaged, or uses a part of the format that is not read here."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. Checked against the file's size."""

    shape: tuple[int, ...]
    """Slowest dimension first, as torch writes it."""
    kind: int
    offset: int
    """From the start of the file, bytes."""
    size_bytes: int


class GgufFile:
    """An open file. Its data is mapped, not read, until a tensor is asked for.

    Raises:
        GgufError: it is no GGUF file, or a damaged one.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise GgufError(f"{path} is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        if self._take(4) != b"GGUF":
            raise GgufError(f"{path} is not a GGUF file")
        version, num_tensors, num_values = self._unpack("<I"), self._unpack("<Q"), self._unpack("<Q")
        if version not in (2, 3):
            raise GgufError(f"{path} is GGUF version {version}; versions 2 and 3 are read here")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("<I"), depth=0)
        self.tensors = self._tensor_table(num_tensors)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32, dequantised, in its shape.

        Raises:
            KeyError: there is none of that name.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, count=info.size_bytes, offset=info.offset)
        if info.kind == _F32:
            values = raw.view("<f4")
        elif info.kind == _F16:
            values = raw.view("<f2").astype(np.float32)
        elif info.kind == _Q8_0:
            blocks = raw.reshape(-1, 34)
            values = _halves(blocks, 0) * blocks[:, 2:].view(np.int8)
        else:
            blocks = raw.reshape(-1, 20)
            nibbles = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)
            values = _halves(blocks, 0) * nibbles + _halves(blocks, 2)
        return values.astype(np.float32, copy=False).reshape(info.shape)

    def _tensor_table(self, count: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name, num_dims = self._string(), self._unpack("<I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise GgufError(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
            dims = tuple(self._unpack("<Q") for _ in range(num_dims))
            entries.append((name, dims[::-1], self._unpack("<I"), self._unpack("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise GgufError(f"the alignment {alignment!r} is out of range")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if kind not in _LAYOUT:
                raise GgufError(f"tensor {name!r} has the type {kind}; F32, F16, Q8_0 and Q4_1 are read here")
            numbers, block_bytes = _LAYOUT[kind]
            if shape[-1] % numbers:
                raise GgufError(f"tensor {name!r}: rows of {shape[-1]} numbers are not whole blocks of {numbers}")
            size = math.prod(shape) // numbers * block_bytes
            if start + offset + size > len(self._data):
                raise GgufError(f"tensor {name!r} reaches beyond the end of the file, which is cut off")
            tensors[name] = TensorInfo(shape, kind, start + offset, size)
        return tensors

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise GgufError(f"the header reaches beyond the end of the file, {len(self._data)} bytes")
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        try:
            return self._take(self._unpack("<Q")).decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"a text in the header is not UTF-8: {error}") from error

    def _value(self, kind: int, *, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("<I"), self._unpack("<Q")
            if depth == _MAX_ARRAY_DEPTH:
                raise GgufError("arrays are nested too deeply")
            if item_kind in _SCALARS:
                item = struct.calcsize(_SCALARS[item_kind])
                return [value for (value,) in struct.iter_unpack(_SCALARS[item_kind], self._take(count * item))]
            return [self._value(item_kind, depth=depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"a metadata value has the unknown type {kind}")
        return self._unpack(_SCALARS[kind])


def _halves(blocks: npt.NDArray[np.uint8], start: int) -> npt.NDArray[np.float32]:
    """The float16 at this byte of every block, as a column of float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)
