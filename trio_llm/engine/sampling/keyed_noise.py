"""Gumbel noise that is a function of (seed, position, token id) and of nothing else.

Adding it to log-probabilities and taking the largest draws from the distribution (the Gumbel-max trick).
No generator state: the batch, the order of requests, chunks and restarts cannot change what is drawn, and
every device computes the same bits up to the logarithm. Used by the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "row_key"]

_MASK64 = 2**64 - 1
_LARGEST_BELOW_ONE = 1 - 2**-24  # float32


def row_key(seed: int, position: int) -> int:
    """Mix a seed (int64) and the position of the token to draw into 64 bits."""
    return _mix64(_mix64(seed & _MASK64) + position)


def gumbel_noise(keys: Sequence[int], token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise.

    Args:
        keys: R row keys.
        token_ids: int32[R, K], or int32[1, K] for the same ids in every row.
    Returns:
        float32[R, K].
    """
    device = token_ids.device
    low = torch.tensor([_signed32(key) for key in keys], dtype=torch.int32, device=device).unsqueeze(1)
    high = torch.tensor([_signed32(key >> 32) for key in keys], dtype=torch.int32, device=device).unsqueeze(1)
    bits = _mix32(_mix32(token_ids * _signed32(0x9E3779B1)) ^ low)  # the inner hash is shared by the rows
    bits = _mix32(bits.add_(high))
    # An exponential variable from v in (0, 1): small v, which win the race, keep full precision.
    v = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(2.0**-31).add_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), with its increment."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on int32, whose products wrap around. Makes one new tensor."""
    x = x ^ _shift_right(x, 16)
    x.mul_(_signed32(0x85EBCA6B))
    x ^= _shift_right(x, 13)
    x.mul_(_signed32(0xC2B2AE35))
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift without the sign: torch's own shift of an int32 keeps it."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x
