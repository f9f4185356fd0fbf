"""Gumbel noise that is a function of seed, position and token id alone.

Adding it to log-probabilities and taking the largest draws from the distribution (the Gumbel-max trick).
There is no generator state: the batch, the order of requests, chunks and restarts cannot change what is drawn, and
every device computes the same bits up to the logarithm. Used by the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "mix_seeds", "negated_gumbel_noise", "row_keys", "token_hashes"]

_LARGEST_BELOW_ONE = 1 - 2**-24  # float32
_MINUS_HALF_A_STEP = torch.tensor(-(2.0**-32))


def mix_seeds(seeds: Tensor) -> Tensor:
    """Seeds as `row_keys` takes them: int64[R] to int64[R]. Once per request."""
    return _mix64(seeds)


def row_keys(mixed_seeds: Tensor, positions: Tensor) -> Tensor:
    """Mix seeds and the positions of the tokens to draw into 64 bits.

    Args:
        mixed_seeds: int64[R], of `mix_seeds`.
        positions: int64[R].
    Returns:
        int64[R].
    """
    return _mix64(mixed_seeds + positions)


def token_hashes(token_ids: Tensor) -> Tensor:
    """Token ids as `gumbel_noise` takes them: int32[1, K] to int32[1, K]. Once per model."""
    return _mix32(token_ids * _signed32(0x9E3779B1))


def gumbel_noise(keys: Tensor, hashes: Tensor) -> Tensor:
    """Standard Gumbel noise.

    Args:
        keys: int64[R], of `row_keys`.
        hashes: int32[1, K], of `token_hashes`.
    Returns:
        float32[R, K].
    """
    return negated_gumbel_noise(keys, hashes).neg_()


def negated_gumbel_noise(keys: Tensor, hashes: Tensor) -> Tensor:
    """`gumbel_noise`, negated: the logarithm of an exponential variable. Subtracting it saves a pass."""
    halves = keys.unsqueeze(1).view(torch.int32)  # [R, 2]: low, high
    bits = _mix32_(hashes ^ halves[:, :1])
    bits = _mix32_(bits.add_(halves[:, 1:]))
    # An exponential variable from v in (0, 1). The smallest decide a draw, and keep full precision. Here it is -v.
    minus_v = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    torch.add(_MINUS_HALF_A_STEP, minus_v, alpha=-(2.0**-31), out=minus_v)
    return minus_v.clamp_(min=-_LARGEST_BELOW_ONE).log1p_().neg_().log_()


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), with its increment, on int64, which wraps around."""
    x = x + _signed64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30, bits=64)) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27, bits=64)) * _signed64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31, bits=64)


def _mix32(x: Tensor) -> Tensor:
    return _mix32_(x.clone())


def _mix32_(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on int32, whose products wrap around. In place."""
    x ^= _shift_right(x, 16, bits=32)
    x.mul_(_signed32(0x85EBCA6B))
    x ^= _shift_right(x, 13, bits=32)
    x.mul_(_signed32(0xC2B2AE35))
    x ^= _shift_right(x, 16, bits=32)
    return x


def _shift_right(x: Tensor, count: int, *, bits: int) -> Tensor:
    """Shift without the sign: torch's own shift of signed integers keeps it."""
    return (x >> count).bitwise_and_((1 << (bits - count)) - 1)


def _signed32(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def _signed64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
