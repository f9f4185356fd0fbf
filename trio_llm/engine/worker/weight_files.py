"""Files of a weight update: read whole, recognised by their checksums, and kept until all of them are there.

Imports no torch: the fake executor uses it, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from trio_llm.errors import EngineStartupError

__all__ = ["StagedFiles", "WeightFile", "WeightSource"]

_CHECKSUM_BYTES: Final = 16
_LENGTH_BYTES: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file with some of a model's weights, and the content that it must have."""

    path: Path
    checksum: str
    """BLAKE2b of the content, 128 bits in hexadecimal."""


WeightSource = Path | tuple[WeightFile, ...]
"""Where weights come from: a directory in Hugging Face form, or files that together have all of them."""


class StagedFiles(Generic[T]):
    """The content of files that an update has so far, in host memory.

    Args:
        decode: makes something of the content of a safetensors file. Any exception means that it is none.
    """

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        self._decode = decode
        self._by_checksum: dict[str, T] = {}

    def stage(self, path: Path) -> str:
        """Read a file and keep what is in it. Returns its checksum.

        Raises:
            EngineStartupError: it cannot be read, or is not in the form of safetensors.
        """
        checksum, content = self._read(path)
        self._by_checksum[checksum] = content
        return checksum

    def collect(self, files: Sequence[WeightFile]) -> list[T]:
        """What is in these files. Those that are not kept are read now.

        Raises:
            EngineStartupError: as `stage`, or a file has another content by now.
        """
        kept = self._by_checksum
        return [kept[file.checksum] if file.checksum in kept else self._read_again(file) for file in files]

    def keep(self, checksums: Collection[str]) -> None:
        """Forget all other files."""
        self._by_checksum = {one: content for one, content in self._by_checksum.items() if one in checksums}

    def _read_again(self, file: WeightFile) -> T:
        checksum, content = self._read(file.path)
        if checksum != file.checksum:
            raise EngineStartupError(f"{str(file.path)!r} has changed since its weights were taken")
        return content

    def _read(self, path: Path) -> tuple[str, T]:
        try:
            # Into memory of our own: a mapped file that is cut short later would end the process.
            data = path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise EngineStartupError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        if data is None:
            raise EngineStartupError(f"{str(path)!r} is not a file")
        try:
            _check_header(data)
            content = self._decode(data)
        except Exception as error:
            raise EngineStartupError(f"{str(path)!r} is not a safetensors file: {str(error)[:200]}") from error
        return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).hexdigest(), content


def _check_header(data: bytes) -> None:
    """
    Raises:
        ValueError: the file does not begin with a table of tensors.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES + length:
        raise ValueError("it is cut short")
    if not isinstance(json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length]), dict):
        raise ValueError("it has no table of tensors")
