"""The likeliest token of each row, quickly also on a CPU. Used by the sampler."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["likeliest", "likeliest_of"]

_CHUNK = 256
_MANY_TOKENS = 4096


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row, the first of equals, and its index, int64[R]. NaN counts as the largest."""
    width = scores.shape[1]
    if scores.is_cuda or width < _MANY_TOKENS:
        best, index = scores.max(1)
        return best, index
    # On a CPU the index costs many times what the value does, so it is looked for in one chunk.
    candidates = _candidates(_chunk_maxima(scores), width)
    best, place = scores.gather(1, candidates).max(1)
    return best, candidates.gather(1, place.unsqueeze(1)).squeeze(1)


def likeliest_of(scores: Tensor, rows: Tensor, runs: list[slice]) -> tuple[Tensor, Tensor]:
    """`likeliest` of some rows. On a CPU copying them would cost more than all else.

    Args:
        rows: int64[R], ascending.
        runs: the same.
    """
    width = scores.shape[1]
    if scores.is_cuda or width < _MANY_TOKENS:
        return likeliest(scores.index_select(0, rows))
    candidates = _candidates(torch.cat([_chunk_maxima(scores[run]) for run in runs]), width)
    best, place = scores[rows.unsqueeze(1), candidates].max(1)
    return best, candidates.gather(1, place.unsqueeze(1)).squeeze(1)


def _chunk_maxima(scores: Tensor) -> Tensor:
    """The largest score of each whole chunk of each row."""
    num_chunks = scores.shape[1] // _CHUNK
    return scores[:, : num_chunks * _CHUNK].unflatten(1, (num_chunks, _CHUNK)).amax(2)


def _candidates(maxima: Tensor, width: int) -> Tensor:
    """Tokens with the likeliest one among them, int64[R, K]: the first best chunk, and what is behind all chunks."""
    candidates = maxima.argmax(1, keepdim=True) * _CHUNK + torch.arange(_CHUNK)
    if (begin := maxima.shape[1] * _CHUNK) < width:
        candidates = torch.cat((candidates, torch.arange(begin, width).expand(len(maxima), -1)), dim=1)
    return candidates
