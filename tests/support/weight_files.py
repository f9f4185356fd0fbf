"""Safetensors files without torch, for the fake executor."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_weights(path: Path, value: float = 0.0, *, name: str = "weight") -> str:
    """Write a file with one number. Returns its name."""
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("<f", value))
    return path.name
