"""Histogram: counts of values by bucket, as plain data that can be sent and added up. And the buckets in use.

Pure. Used by the Prometheus logger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

__all__ = [
    "FIRST_TOKEN_S",
    "HTTP_S",
    "HTTP_S_BY_HANDLER",
    "INTER_TOKEN_S",
    "NUM_CHOICES",
    "NUM_PREEMPTIONS",
    "OPERATION_S",
    "REQUEST_S",
    "STEP_TOKENS",
    "Histogram",
    "add_histograms",
    "make_histogram",
    "one_two_five",
]

# fmt: off
FIRST_TOKEN_S: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)
INTER_TOKEN_S: Final = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S: Final = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_CHOICES: Final = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
OPERATION_S: Final = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
HTTP_S: Final = (
    .01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60
)
HTTP_S_BY_HANDLER: Final = (.1, .5, 1)
# fmt: on


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds: list[float] = []
    decade = 1
    while decade <= limit:
        bounds.extend(decade * step for step in (1, 2, 5) if decade * step <= limit)
        decade *= 10
    return tuple(bounds)


class Histogram(msgspec.Struct):
    """Adding a value costs a binary search."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets but the last, which takes the rest. A value on a bound is inside."""
    counts: list[int]
    """One per bucket, so one more than bounds; not cumulative."""
    total: float = 0.0
    """Of all values."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, values: Iterable[float]) -> None:
        counts, bounds, total = self.counts, self.bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    @property
    def is_empty(self) -> bool:
        return not any(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as the exposition format wants them: cumulative."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


def make_histogram(bounds: Sequence[float]) -> Histogram:
    """An empty one."""
    return Histogram(tuple(map(float, bounds)), [0] * (len(bounds) + 1))


def add_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """The histogram of all their values. Empty ones may have other buckets than the rest.

    Raises:
        ValueError: two that have values differ in their buckets.
    """
    full = [one for one in histograms if not one.is_empty] or histograms[:1]
    bounds = full[0].bounds
    if any(one.bounds != bounds for one in full):
        raise ValueError(f"histograms of other buckets cannot be added: {[one.bounds for one in full]}")
    counts = [sum(column) for column in zip(*(one.counts for one in full), strict=True)]
    return Histogram(bounds, counts, sum(one.total for one in full))
