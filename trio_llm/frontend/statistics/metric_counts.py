"""MetricsSnapshot: all that one front end counts for Prometheus, as plain data, and how several of them add up.

Pure. Kept by `PrometheusStatLogger`, which counts in it, and sent between front ends that answer for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from trio_llm.errors import QueuedTokensError, QueueFullError
from trio_llm.frontend.statistics import histogram
from trio_llm.frontend.statistics.histogram import Histogram, add_histograms, make_histogram
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats
from trio_llm.wire.messages import ModelConfig, SchedulerStats

__all__ = [
    "OPERATIONS",
    "SIZES",
    "CacheInfo",
    "EngineCounts",
    "EngineGauges",
    "HandlerCounts",
    "HttpCounts",
    "MetricsSnapshot",
    "OperationCounts",
    "Total",
    "make_engine_counts",
    "merge",
]

OPERATIONS: Final = ("sleep", "wake")
_COUNTERS: Final = ("prompt_tokens", "queried_tokens", "cached_tokens", "generation_tokens")
_FINISH_REASONS: Final = ("stop", "length", "abort", "error")

SIZES: Final = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)
"""Histograms of tokens, whose buckets end at the length of the model."""
_BOUNDS: Final = {
    "time_to_first_token_seconds": histogram.FIRST_TOKEN_S,
    "inter_token_latency_seconds": histogram.INTER_TOKEN_S,
    "iteration_tokens_total": histogram.STEP_TOKENS,
    "request_time_per_output_token_seconds": histogram.INTER_TOKEN_S,
    "e2e_request_latency_seconds": histogram.REQUEST_S,
    "request_queue_time_seconds": histogram.REQUEST_S,
    "request_inference_time_seconds": histogram.REQUEST_S,
    "request_prefill_time_seconds": histogram.REQUEST_S,
    "request_decode_time_seconds": histogram.REQUEST_S,
    "request_num_preemptions": histogram.NUM_PREEMPTIONS,
    "request_params_n": histogram.NUM_CHOICES,
}
"""Buckets of the other histograms."""


def _computed_tokens(request: FinishedRequestStats) -> int | None:
    """None: its prompt was not computed to the end."""
    if request.prefill_time_s is None:
        return None
    return request.num_prompt_tokens - request.num_cached_tokens


_OBSERVED: Final[dict[str, Callable[[FinishedRequestStats], float | None]]] = {
    "e2e_request_latency_seconds": attrgetter("e2e_latency_s"),
    "request_queue_time_seconds": attrgetter("queue_time_s"),
    "request_prefill_time_seconds": attrgetter("prefill_time_s"),
    "request_decode_time_seconds": attrgetter("decode_time_s"),
    "request_inference_time_seconds": attrgetter("inference_time_s"),
    "request_time_per_output_token_seconds": attrgetter("time_per_output_token_s"),
    "request_prompt_tokens": attrgetter("num_prompt_tokens"),
    "request_generation_tokens": attrgetter("num_output_tokens"),
    "request_max_num_generation_tokens": attrgetter("max_num_output_tokens"),
    "request_params_max_tokens": attrgetter("max_tokens"),
    "request_params_n": attrgetter("num_choices"),
    "request_prefill_kv_computed_tokens": _computed_tokens,
    "request_num_preemptions": attrgetter("num_preemptions"),
}
"""What each ended request adds to which histogram; None: nothing."""


class EngineGauges(msgspec.Struct, frozen=True):
    """The newest state of an engine's scheduler."""

    engine_time_s: float = 0.0
    """The engine's clock then."""
    stats: SchedulerStats = SchedulerStats()


class CacheInfo(msgspec.Struct, frozen=True):
    """An engine's KV cache."""

    block_size: int
    num_blocks: int
    dtype: str


class EngineCounts(msgspec.Struct):
    """What one engine did since the logger was made."""

    gauges: EngineGauges
    counters: dict[str, int]
    finished: dict[str, int]
    """Ended requests by reason."""
    histograms: dict[str, Histogram]
    cache: CacheInfo | None = None
    """None: it has not been ready."""
    num_preempted: int = 0
    num_restarts: int = 0

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            # The engine counts from its own start: after a restart it begins at 0, and a counter must not fall.
            before, now = self.gauges.stats.num_preempted, scheduler.num_preempted
            self.num_preempted += now - before if now >= before else now
            self.gauges = EngineGauges(iteration.engine_time_s, scheduler)
        self.num_restarts += iteration.num_restarts
        counters, histograms = self.counters, self.histograms
        counters["prompt_tokens"] += iteration.num_prompt_tokens
        counters["queried_tokens"] += iteration.num_queried_tokens
        counters["cached_tokens"] += iteration.num_cached_tokens
        counters["generation_tokens"] += iteration.num_generation_tokens
        if iteration.time_to_first_token_s:
            histograms["time_to_first_token_seconds"].observe_many(iteration.time_to_first_token_s)
        if iteration.inter_token_latency_s:
            histograms["inter_token_latency_seconds"].observe_many(iteration.inter_token_latency_s)
        if iteration.step_tokens:
            histograms["iteration_tokens_total"].observe_many(iteration.step_tokens)
        for request in iteration.finished:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        reason = request.finish_reason
        self.finished[reason] = self.finished.get(reason, 0) + 1
        for name, observed in _OBSERVED.items():
            if (value := observed(request)) is not None:
                self.histograms[name].observe(value)

    def record_ready(self, model: ModelConfig, *, sizes_up_to: int | None) -> None:
        """The engine has loaded its model.

        Args:
            sizes_up_to: tokens that the buckets of sizes end at; None: they stay.
        """
        self.cache = CacheInfo(model.block_size, model.num_blocks, model.dtype)
        if sizes_up_to is not None and all(self.histograms[name].is_empty for name in SIZES):
            bounds = histogram.one_two_five(sizes_up_to)
            self.histograms.update({name: make_histogram(bounds) for name in SIZES})


def make_engine_counts(max_model_len: int) -> EngineCounts:
    """All zero."""
    sizes = dict.fromkeys(SIZES, histogram.one_two_five(max_model_len))
    return EngineCounts(
        EngineGauges(),
        dict.fromkeys(_COUNTERS, 0),
        dict.fromkeys(_FINISH_REASONS, 0),
        {name: make_histogram(bounds) for name, bounds in {**_BOUNDS, **sizes}.items()},
    )


class Total(msgspec.Struct):
    """Number and sum of values."""

    count: int = 0
    total: int = 0

    def add(self, value: int) -> None:
        self.count += 1
        self.total += value


class HandlerCounts(msgspec.Struct):
    """The HTTP requests of one route."""

    requests: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """By method, then by class of status, such as `2xx`."""
    durations: dict[str, Histogram] = msgspec.field(default_factory=dict)
    """By method; seconds."""
    request_bytes: Total = msgspec.field(default_factory=Total)
    response_bytes: Total = msgspec.field(default_factory=Total)


class HttpCounts(msgspec.Struct):
    """The HTTP requests of a server."""

    handlers: dict[str, HandlerCounts] = msgspec.field(default_factory=dict)
    """By the path of the route."""
    durations: Histogram = msgspec.field(default_factory=lambda: make_histogram(histogram.HTTP_S))
    """Of all; seconds."""


class OperationCounts(msgspec.Struct):
    """One kind of call that changes all engines."""

    num_in_flight: int = 0
    durations: Histogram = msgspec.field(default_factory=lambda: make_histogram(histogram.OPERATION_S))


class MetricsSnapshot(msgspec.Struct):
    """All that one front end counts."""

    model_name: str
    has_engine_stats: bool = True
    """False: statistics are off, and there is nothing of engines."""
    engines: dict[int, EngineCounts] = msgspec.field(default_factory=dict)
    """By the index of the engine."""
    rejections: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys((QueueFullError.reason, QueuedTokensError.reason), 0)
    )
    """Refused requests by reason."""
    operations: dict[str, OperationCounts] = msgspec.field(
        default_factory=lambda: {name: OperationCounts() for name in OPERATIONS}
    )
    http: HttpCounts = msgspec.field(default_factory=HttpCounts)

    def copy(self) -> MetricsSnapshot:
        """With nothing in common with this one."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=MetricsSnapshot)


def merge(snapshots: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
    """What several front ends of the same engines count together; at least one. Shares data with them.

    What each counts of its own requests adds up. What an engine tells all of them is its newest word (gauges), or the
    most that one of them has heard (preemptions, restarts). What is the same for all is the first one's.

    Raises:
        ValueError: histograms differ in their buckets: these are not front ends of the same engines.
    """
    first = snapshots[0]
    indices = sorted({index for snapshot in snapshots for index in snapshot.engines})
    return MetricsSnapshot(
        first.model_name,
        any(snapshot.has_engine_stats for snapshot in snapshots),
        {
            index: _merge_engine([snapshot.engines[index] for snapshot in snapshots if index in snapshot.engines])
            for index in indices
        },
        _add([snapshot.rejections for snapshot in snapshots]),
        _add([snapshot.operations for snapshot in snapshots]),
        _add([snapshot.http for snapshot in snapshots]),
    )


def _merge_engine(counts: Sequence[EngineCounts]) -> EngineCounts:
    return EngineCounts(
        max((one.gauges for one in counts), key=attrgetter("engine_time_s")),
        _add([one.counters for one in counts]),
        _add([one.finished for one in counts]),
        _add([one.histograms for one in counts]),
        next((one.cache for one in counts if one.cache is not None), None),
        max(one.num_preempted for one in counts),
        max(one.num_restarts for one in counts),
    )


def _add(values: Sequence[Any]) -> Any:
    """Numbers, histograms, dicts and structs of these, of one form."""
    first = values[0]
    if isinstance(first, dict):
        keys = {key: None for value in values for key in value}  # in the order in which they come
        return {key: _add([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, Histogram):
        return add_histograms(values)
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(*(_add([getattr(value, name) for value in values]) for name in names))
    return sum(values)
