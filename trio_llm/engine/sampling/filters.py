"""top-k and top-p: which tokens of each row may be drawn.

Both become one threshold on the logits, so tokens of equal logits stay or go together: what is kept depends
on the row alone, never on how a sort orders equals. Used by the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["filter_threshold"]

_FIRST_LOOK = 1024
"""Likeliest tokens that a row with top-p alone looks at first: its nucleus is nearly always smaller."""


def filter_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that each row keeps: top-k first, then top-p of what that leaves.

    A full sort is paid only by rows whose kept set does not end within a first, cheap look.

    Args:
        logits: float32[R, V], after temperature.
        top_k: int64[R]; 0: no limit.
        top_p: float32[R] in (0, 1].
    Returns:
        float32[R, 1]. The likeliest token is at or above it.
    """
    vocabulary = logits.shape[1]
    limit = torch.where(top_k == 0, vocabulary, top_k.clamp(max=vocabulary))
    looks = torch.where(limit < _FIRST_LOOK, limit + 1, _FIRST_LOOK)
    width = min(vocabulary, int(looks.max()))
    threshold, is_complete = _threshold_within(logits, limit, top_p, width=width)
    if width < vocabulary and not bool(is_complete.all()):
        rows = (~is_complete).nonzero().squeeze(1)
        threshold[rows], _ = _threshold_within(logits[rows], limit[rows], top_p[rows], width=vocabulary)
    return threshold


def _threshold_within(logits: Tensor, limit: Tensor, top_p: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """What the `width` likeliest tokens tell: thresholds, float32[R, 1], and whether they are final, bool[R]."""
    best = logits.topk(width, dim=1).values  # [R, width], descending
    peak = best[:, :1]
    reaches_limit = (limit <= width).unsqueeze(1)
    kth = best.gather(1, (limit.clamp(max=width) - 1).unsqueeze(1))
    floor = torch.where(reaches_limit, kth, float("-inf"))

    mass = (best - peak).exp().masked_fill(best < floor, 0)
    cumulative = mass.cumsum(1, dtype=torch.float64)
    whole_row = torch.softmax(logits, dim=1).amax(1, keepdim=True).reciprocal()  # the row's sum of exp(logit - peak)
    total = torch.where(reaches_limit, cumulative[:, -1:], whole_row)
    is_in_nucleus = (cumulative - mass < top_p.unsqueeze(1) * total) & (best >= floor)
    size = is_in_nucleus.sum(1, keepdim=True)
    wants_nucleus = (top_p < 1).unsqueeze(1)
    threshold = torch.where(wants_nucleus, best.gather(1, size - 1), floor)

    is_complete = torch.where(
        reaches_limit,
        ~wants_nucleus | (best[:, -1:] < kth),  # all that equal the k-th were seen
        (limit == logits.shape[1]).unsqueeze(1) & wants_nucleus & (size < width),
    )
    return threshold, is_complete.squeeze(1)
