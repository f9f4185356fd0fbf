"""make_families: a MetricsSnapshot as Prometheus families, under the names that vLLM's dashboards use.

Used by the Prometheus logger at each scrape. `docs/observability.md` has a table of them, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric

from trio_llm.frontend.statistics.histogram import Histogram
from trio_llm.frontend.statistics.metric_counts import EngineCounts, HttpCounts, MetricsSnapshot
from trio_llm.version import __version__

__all__ = ["make_families"]

_LABELS: Final = ("model_name", "engine")
_SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
"""By the level of sleep."""

_COUNTERS: Final[tuple[tuple[str, str, Callable[[EngineCounts], float]], ...]] = (
    (
        "vllm:prompt_tokens",
        "Prompt tokens of requests whose first token, or vector, has come.",
        lambda e: e.counters["prompt_tokens"],
    ),
    ("vllm:generation_tokens", "Generated tokens.", lambda e: e.counters["generation_tokens"]),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens that were in the prefix cache.",
        lambda e: e.counters["cached_tokens"],
    ),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens that the prefix cache was asked for.",
        lambda e: e.counters["queried_tokens"],
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens that the prefix cache was asked for and had.",
        lambda e: e.counters["cached_tokens"],
    ),
    ("vllm:num_preemptions", "Times that a request lost its KV blocks to others.", lambda e: e.num_preempted),
    (
        "trio_llm:engine_restarts",
        "Engines that were started after another one had died.",
        lambda e: e.num_restarts,
    ),
)

_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two deliveries of tokens of a request.",
    "iteration_tokens_total": "Tokens of one step of the engine; a prompt counts with its first token.",
    "request_time_per_output_token_seconds": "Mean between two tokens of an ended request that has at least two.",
    "e2e_request_latency_seconds": "From the arrival of an ended request to its end.",
    "request_queue_time_seconds": "From the registration of an ended request until its first token was planned.",
    "request_prefill_time_seconds": "From the planning of an ended request to its first token, or to its vector.",
    "request_decode_time_seconds": "From the first token of an ended request to its last one.",
    "request_inference_time_seconds": "Prefill and decode of an ended request.",
    "request_prompt_tokens": "Prompt tokens of ended requests.",
    "request_generation_tokens": "Generated tokens of ended requests; each choice is a request.",
    "request_max_num_generation_tokens": "Generated tokens of the longest choice of ended answers.",
    "request_params_n": "Choices that ended answers were asked for.",
    "request_params_max_tokens": "Limit of the tokens of ended requests, the default included.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of ended requests that were computed, not found in the cache.",
    "request_num_preemptions": "Times that a request lost its KV blocks; of requests that the engine has ended.",
}


def make_families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """All families of a snapshot. Each has one at least, except those of HTTP requests before the first one."""
    if snapshot.has_engine_stats:
        yield from _Families(snapshot).make()
    enabled = GaugeMetricFamily(
        "trio_llm_engine_statistics", "1: there are series of the engines; 0: --disable-log-stats has turned them off."
    )
    enabled.add_metric([], float(snapshot.has_engine_stats))
    yield enabled
    build = GaugeMetricFamily("trio_llm_build_info", "The version that runs; always 1.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    yield from _http_families(snapshot.http)


class _Families:
    """The families of engines."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot
        self._engines = snapshot.engines
        self._model_name = snapshot.model_name

    def make(self) -> Iterator[Metric]:
        yield from self._gauges()
        for name, text, value_of in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for index, counts in self._engines.items():
                counter.add_metric([self._model_name, str(index)], value_of(counts))
            yield counter
        yield from self._labelled_counters()
        for name, text in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for index, counts in self._engines.items():
                _add_histogram(family, [self._model_name, str(index)], counts.histograms[name])
            yield family
        yield from self._operations()

    def _gauges(self) -> Iterator[Metric]:
        for name, text, value_of in (
            ("num_requests_running", "Requests in the batch of the engine.", lambda e: e.gauges.stats.num_running),
            ("num_requests_waiting", "Requests waiting in the engine.", lambda e: e.gauges.stats.num_waiting),
            ("kv_cache_usage_perc", "KV blocks in use, from 0 to 1.", _cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for index, counts in self._engines.items():
                gauge.add_metric([self._model_name, str(index)], value_of(counts))
            yield gauge
        yield self._by_label(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Waiting requests: for room (capacity), or for their client or the end of a pause or sleep (deferred).",
            "reason",
            _waiting_by_reason,
        )
        yield self._by_label(
            GaugeMetricFamily,
            "engine_sleep_state",
            "1 for the state that the engine is in; 0 for all of a dead one.",
            "sleep_state",
            _sleep_states,
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The engine's KV cache, on whatever device; always 1.",
            labels=["engine", "block_size", "num_gpu_blocks", "cache_dtype"],
        )
        for index, counts in self._engines.items():
            if (cache := counts.cache) is not None:
                info.add_metric([str(index), str(cache.block_size), str(cache.num_blocks), cache.dtype], 1)
        yield info

    def _labelled_counters(self) -> Iterator[Metric]:
        yield self._by_label(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "Prompt tokens by where their K and V come from.",
            "source",
            lambda e: {
                "local_compute": e.counters["prompt_tokens"] - e.counters["cached_tokens"],
                "local_cache_hit": e.counters["cached_tokens"],
                "external_kv_transfer": 0,
            },
        )
        yield self._by_label(
            CounterMetricFamily,
            "prompt_tokens_cached_by_source",
            "Prompt tokens that were in the prefix cache, by where that is.",
            "source",
            lambda e: {"device": e.counters["cached_tokens"]},
        )
        yield self._by_label(
            CounterMetricFamily,
            "request_success",
            "Requests that ended, by reason; each choice of an answer is one.",
            "finished_reason",
            lambda e: e.finished,
        )
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused for the load, by limit.", labels=["model_name", "reason"]
        )
        for reason, count in self._snapshot.rejections.items():
            rejections.add_metric([self._model_name, reason], count)
        yield rejections

    def _by_label(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values_of: Callable[[EngineCounts], Mapping[str, float]],
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=[*_LABELS, label])
        for index, counts in self._engines.items():
            for value, count in values_of(counts).items():
                family.add_metric([self._model_name, str(index), value], count)
        return family

    def _operations(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "vllm:sleep_mode_operation_duration_seconds",
            "Duration of calls that put all engines to sleep or wake them.",
            labels=["operation"],
        )
        in_flight = GaugeMetricFamily(
            "vllm:sleep_mode_operations_in_flight",
            "Calls that put all engines to sleep or wake them and are not over.",
            labels=["operation"],
        )
        for name, counts in self._snapshot.operations.items():
            _add_histogram(durations, [name], counts.durations)
            in_flight.add_metric([name], counts.num_in_flight)
        yield durations
        yield in_flight


def _cache_usage(counts: EngineCounts) -> float:
    stats = counts.gauges.stats
    return (stats.num_blocks - stats.num_free_blocks) / stats.num_blocks if stats.num_blocks else 0.0


def _waiting_by_reason(counts: EngineCounts) -> Mapping[str, float]:
    stats = counts.gauges.stats
    return {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}


def _sleep_states(counts: EngineCounts) -> Mapping[str, float]:
    stats = counts.gauges.stats
    is_known = stats.num_blocks > 0
    return {name: float(is_known and level == stats.sleep_level) for level, name in enumerate(_SLEEP_STATES)}


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.buckets(), histogram.total)


def _http_families(http: HttpCounts) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "http_requests", "HTTP requests by route, method and class of status.", labels=["handler", "method", "status"]
    )
    sizes = SummaryMetricFamily("http_request_size_bytes", "Bytes of the bodies of requests.", labels=["handler"])
    answers = SummaryMetricFamily(
        "http_response_size_bytes", "Bytes of the bodies of answers that are not streamed.", labels=["handler"]
    )
    highr = HistogramMetricFamily("http_request_duration_highr_seconds", "From a request's head to the answer's end.")
    by_handler = HistogramMetricFamily(
        "http_request_duration_seconds",
        "From a request's head to the answer's end, by route and method, in few buckets.",
        labels=["handler", "method"],
    )
    for handler, counts in http.handlers.items():
        for method, by_status in counts.requests.items():
            for status, count in by_status.items():
                requests.add_metric([handler, method, status], count)
        sizes.add_metric([handler], counts.request_bytes.count, counts.request_bytes.total)
        answers.add_metric([handler], counts.response_bytes.count, counts.response_bytes.total)
        for method, durations in counts.durations.items():
            _add_histogram(by_handler, [handler, method], durations)
    _add_histogram(highr, [], http.durations)
    yield from (requests, sizes, answers, highr, by_handler)
