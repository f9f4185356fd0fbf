"""Filters: which tokens of each row may be drawn, by min_p, top-k and top-p. A new one is one class and one entry in
`FILTERS`.

Each gives one threshold on the logits, so tokens of equal logits stay or go together: what is kept depends on the row
alone, never on how a sort orders equals. Used by the sampler.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Final, Self

import torch
from torch import Tensor

from trio_llm.engine.transfer import to_device
from trio_llm.sampling import SamplingParams

__all__ = ["FILTERS", "Filter", "MinPFilter", "TopFilter"]

_FIRST_LOOK = 1024
"""Likeliest tokens that a row with top-p alone looks at first: its nucleus is nearly always smaller."""


class Filter(abc.ABC):
    """Made for R rows of a batch, and used at each step until the batch changes."""

    @staticmethod
    @abc.abstractmethod
    def applies(params: SamplingParams, width: int) -> bool:
        """Whether a row that is drawn needs this filter.

        Args:
            width: tokens in the vocabulary.
        """

    @classmethod
    @abc.abstractmethod
    def make(cls, rows: Sequence[SamplingParams], *, width: int, device: torch.device) -> Self:
        """A filter for rows it applies to, at least one."""

    @abc.abstractmethod
    def threshold(self, logits: Tensor) -> Tensor:
        """The smallest logit that each row keeps; the likeliest token is at or above it.

        Args:
            logits: float32[R, V], after temperature and the filters before this one.
        Returns:
            float32[R, 1]. Has no meaning for a row that has NaN or infinity.
        """


class MinPFilter(Filter):
    """min_p of R rows that have neither top-k nor top-p."""

    def __init__(self, min_p: Sequence[float], device: torch.device) -> None:
        self._margin = _log_column(min_p, device)

    @staticmethod
    def applies(params: SamplingParams, width: int) -> bool:
        return params.min_p > 0 and not TopFilter.applies(params, width)

    @classmethod
    def make(cls, rows: Sequence[SamplingParams], *, width: int, device: torch.device) -> Self:
        return cls([one.min_p for one in rows], device)

    def threshold(self, logits: Tensor) -> Tensor:
        return logits.amax(1, keepdim=True) + self._margin


class TopFilter(Filter):
    """top-k, then top-p of what that leaves, for R rows; of what min_p leaves where they use that, too.

    Args:
        top_k: R of them; 0: no limit.
        top_p: R of them, in (0, 1].
        min_p: R of them, in [0, 1].
        width: tokens in the vocabulary.
    """

    def __init__(
        self,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        *,
        width: int,
        device: torch.device,
    ) -> None:
        limits = [min(k, width) or width for k in top_k]
        first_look = min(width, _FIRST_LOOK)
        self._limit = to_device(limits, device, dtype=torch.int64).unsqueeze(1)
        self._top_p = to_device(top_p, device, dtype=torch.float32).unsqueeze(1)
        self._margin = _log_column(min_p, device) if any(min_p) else None
        self._has_nucleus = any(p < 1 for p in top_p)
        alone = [i for i, limit in enumerate(limits) if limit == width > first_look and top_p[i] < 1]
        wide = [i for i, limit in enumerate(limits) if first_look < limit < width]
        if device.type != "cpu":
            # Whether a nucleus ends within the first look can be asked on a CPU. A GPU would have to be waited for, so
            # there such rows are sorted as a whole.
            wide, alone = wide + alone, []
        self._may_look_again = bool(alone)
        self._wide = to_device(wide, device, dtype=torch.int64) if wide else None
        # One more than the limit shows whether others equal the last one.
        self._wide_look = min(width, max((limits[i] for i in wide), default=0) + 1)
        narrow = [limit for limit in limits if limit <= first_look]
        self._look = min(width, max(narrow, default=0) + 1)
        if alone:
            self._look = max(self._look, first_look)

    @staticmethod
    def applies(params: SamplingParams, width: int) -> bool:
        return params.top_p < 1 or 0 < params.top_k < width

    @classmethod
    def make(cls, rows: Sequence[SamplingParams], *, width: int, device: torch.device) -> Self:
        return cls(
            [one.top_k for one in rows],
            [one.top_p for one in rows],
            [one.min_p for one in rows],
            width=width,
            device=device,
        )

    def threshold(self, logits: Tensor) -> Tensor:
        threshold, is_final = self._look_at(logits, None, look=self._look)
        if self._wide is not None:
            wide, _ = self._look_at(logits, self._wide, look=self._wide_look)
            threshold.index_copy_(0, self._wide, wide)
            is_final.index_fill_(0, self._wide, True)
        if self._may_look_again and not bool(is_final.all()):
            rows = (~is_final).nonzero().squeeze(1)
            again, _ = self._look_at(logits, rows, look=logits.shape[1])
            threshold.index_copy_(0, rows, again)
        return threshold

    def _look_at(self, logits: Tensor, rows: Tensor | None, *, look: int) -> tuple[Tensor, Tensor]:
        """Thresholds by the `look` likeliest tokens of some rows, or all.

        Returns:
            Thresholds, float32[R, 1], and whether they are final, bool[R].
        """
        limit, top_p, margin = self._limit, self._top_p, self._margin
        if rows is not None:
            logits, limit, top_p = (tensor.index_select(0, rows) for tensor in (logits, limit, top_p))
            margin = None if margin is None else margin.index_select(0, rows)
        is_all = look == logits.shape[1]
        best = logits.sort(1, descending=True)[0] if is_all else logits.topk(look, 1)[0]  # [R, look]
        peak = best[:, :1]
        has_seen_limit = limit <= look
        floor = torch.where(has_seen_limit, best.gather(1, limit.clamp(max=look) - 1), float("-inf"))
        if margin is not None:
            floor = torch.maximum(floor, peak + margin)
        is_known = has_seen_limit | (limit == logits.shape[1])
        if not self._has_nucleus:
            return floor, is_known.squeeze(1)

        wants_nucleus = top_p < 1
        mass = (best - peak).exp().masked_fill_(best < floor, 0)
        cumulative = mass.cumsum(1, dtype=torch.float64)
        # Nothing here may depend on how far this look goes, for that depends on the other rows.
        goes_on = ~has_seen_limit | (best.gather(1, limit.clamp(max=look - 1)) == floor)
        total = self._total(logits, floor, wants_nucleus & goes_on, seen=cumulative[:, -1:])
        size = ((cumulative - mass < top_p * total) & (best >= floor)).sum(1, keepdim=True)
        # None is in the nucleus of a row that is not finite.
        last = best.gather(1, (size - 1).clamp_(min=0))
        # Equals of the k-th that were not seen have changed the total alone.
        has_end = has_seen_limit | (size < look) | (best[:, -1:] < floor)
        return torch.where(wants_nucleus, last, floor), (is_known & (~wants_nucleus | has_end)).squeeze(1)

    def _total(self, logits: Tensor, floor: Tensor, goes_on: Tensor, *, seen: Tensor) -> Tensor:
        """The sum of exp(logit - peak) over what is not below the floor, [R, 1].

        Args:
            goes_on: bool[R, 1], rows where that may be more than what was seen.
            seen: float64[R, 1], the sum over what was seen.
        """
        if logits.is_cuda:
            return torch.where(goes_on, _mass(logits, floor), seen)
        rows = goes_on.squeeze(1).nonzero().squeeze(1)
        if len(rows) == 0:
            return seen
        mass = _mass(logits.index_select(0, rows), floor.index_select(0, rows))
        return seen.index_copy(0, rows, mass.double())


FILTERS: Final[tuple[type[Filter], ...]] = (MinPFilter, TopFilter)
"""The order in which they are applied to a row. The rows of the last one are one slice of every batch, so the most
expensive filter is the last."""


def _mass(logits: Tensor, floor: Tensor) -> Tensor:
    """The sum over exp(logit - peak), by a softmax: it sums a row in the same way in any batch."""
    left = logits.masked_fill(logits < floor, float("-inf"))
    return torch.softmax(left, dim=1).amax(1, keepdim=True).reciprocal_()


def _log_column(min_p: Sequence[float], device: torch.device) -> Tensor:
    """float32[R, 1]: how far below the likeliest token a logit may be."""
    margins = [math.log(p) if p > 0 else -math.inf for p in min_p]
    return to_device(margins, device, dtype=torch.float32).unsqueeze(1)
