"""The numbers that fix how the KV cache lies in memory: [blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim].

Pure. Used by all that computes block tables and slots, with torch or without.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BLOCK_SIZE"]

BLOCK_SIZE: Final = 32
"""Tokens in a block of the KV cache."""
