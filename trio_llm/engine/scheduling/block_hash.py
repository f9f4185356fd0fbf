"""The hash chain: what a full KV block holds, as 16 bytes that stand for its tokens and all that come before them.

Pure. Used by the scheduler.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Final

__all__ = ["NO_SALT", "BlockHash", "extend_hashes", "salted"]

BlockHash = bytes
"""BLAKE2b (RFC 7693) with 16 bytes, of the hash of the block before and the tokens' ids. Nobody finds two contents
with one hash, by chance or on purpose, so the contents need not be compared."""

_HASH_BYTES: Final = 16
NO_SALT: Final[BlockHash] = b""


def salted(*, cache_salt: str | None) -> BlockHash:
    """What a chain begins with: chains that begin differently share no blocks."""
    return NO_SALT if cache_salt is None else blake2b(cache_salt.encode(), digest_size=_HASH_BYTES).digest()


def extend_hashes(hashes: list[BlockHash], token_ids: list[int], block_size: int, *, root: BlockHash) -> None:
    """Append the hashes of those full blocks of `token_ids` that have none yet.

    Args:
        hashes: of the first blocks; changed.
        token_ids: of which those that were there before have not changed.
        root: what the chain begins with; see `salted`.
    """
    previous = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        content = array("q", token_ids[start : start + block_size]).tobytes()
        previous = blake2b(previous + content, digest_size=_HASH_BYTES).digest()
        hashes.append(previous)
