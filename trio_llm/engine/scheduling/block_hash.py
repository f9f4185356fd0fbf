"""The hash chain: 16 bytes that stand for the tokens of a full KV block and for all tokens before them.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Final

__all__ = ["NO_SALT", "BlockHash", "extend_hashes", "salted"]

BlockHash = bytes
"""BLAKE2b (RFC 7693) with 16 bytes, of the hash of the block before and the token ids. Two contents with one hash
cannot be found, by chance or on purpose, so contents are not compared."""

_HASH_BYTES: Final = 16
NO_SALT: Final[BlockHash] = b""


def salted(*, cache_salt: str | None) -> BlockHash:
    """The root of a chain. Chains with different roots share no blocks."""
    return NO_SALT if cache_salt is None else blake2b(cache_salt.encode(), digest_size=_HASH_BYTES).digest()


def extend_hashes(hashes: list[BlockHash], token_ids: list[int], block_size: int, *, root: BlockHash) -> None:
    """Append the hashes of the full blocks of `token_ids` that have none yet.

    Args:
        hashes: the hashes of the first blocks; extended.
        token_ids: all tokens; those that `hashes` covers must not have changed.
        root: the root of the chain; see `salted`.
    """
    previous = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        content = array("q", token_ids[start : start + block_size]).tobytes()
        previous = blake2b(previous + content, digest_size=_HASH_BYTES).digest()
        hashes.append(previous)
