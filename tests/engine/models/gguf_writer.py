"""Write small GGUF files, for tests."""

from __future__ import annotations

import struct
from typing import Any

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(content: Any) -> bytes:
    """Type and content of a metadata value."""
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + string(content)
        case list():
            items = [value(item) for item in content]
            kind = items[0][:4]
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    raise TypeError(content)


def gguf(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], *, version: int = 3
) -> bytes:
    """A file. Tensors: type, shape (slowest dimension first), raw data."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, content in metadata.items():
        out += string(key) + value(content)
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        out += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", kind, offset)
        offset += -(-len(data) // 32) * 32
    out += bytes(-len(out) % 32)
    for _, _, data in tensors.values():
        out += data + bytes(-len(data) % 32)
    return out
