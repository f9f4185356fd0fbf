"""PrometheusStatLogger: statistics as Prometheus series, under the names that vLLM's dashboards use.

Counts in plain lists and integers, because it is called for every batch of tokens; the exposition format is
made only for a scrape. The output handler records, and the HTTP app renders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trio_llm.errors import QueuedTokensError, QueueFullError
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats
from trio_llm.version import __version__
from trio_llm.wire.messages import SchedulerStats

__all__ = ["PrometheusStatLogger"]

_LABELS = ("model_name", "engine")
_REJECTIONS = (QueueFullError.reason, QueuedTokensError.reason)
_FINISH_REASONS = ("stop", "length", "abort", "error")

# fmt: off
_FIRST_TOKEN_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_INTER_TOKEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# fmt: on


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds: list[float] = []
    decade = 1
    while decade <= limit:
        bounds.extend(decade * step for step in (1, 2, 5) if decade * step <= limit)
        decade *= 10
    return tuple(bounds)


class _Histogram:
    """Counts of values by bucket. Adding a value costs a binary search."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # [i]: values <= bounds[i] and > bounds[i - 1]; the last: the rest
        self._sum = 0.0

    def observe_many(self, values: Iterable[float]) -> None:
        counts, bounds, total = self._counts, self._bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as the exposition format wants them: cumulative."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


@dataclass(slots=True)
class _Counters:
    """Sums since the logger was made."""

    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_restarts: int = 0

    def add(self, iteration: IterationStats) -> None:
        """Add what one batch has of them. Preemptions come with the scheduler's statistics."""
        self.num_prompt_tokens += iteration.num_prompt_tokens
        self.num_queried_tokens += iteration.num_queried_tokens
        self.num_cached_tokens += iteration.num_cached_tokens
        self.num_generation_tokens += iteration.num_generation_tokens
        self.num_restarts += iteration.num_restarts


class PrometheusStatLogger:
    """Counts since it was made, for one model and one engine.

    Args:
        model_name: value of the label `model_name`.
        engine: value of the label `engine`: the rank.
        max_model_len: tokens; the largest bucket of the histograms of request sizes is at or below it.
    """

    def __init__(self, model_name: str, *, engine: str = "0", max_model_len: int = 131_072) -> None:
        self._model_name = model_name
        self._engine = engine
        self._scheduler = SchedulerStats()
        self._counters = _Counters()
        self._finished: dict[str, int] = dict.fromkeys(_FINISH_REASONS, 0)
        self._rejections: dict[str, int] = dict.fromkeys(_REJECTIONS, 0)
        self._first_token_s = _Histogram(_FIRST_TOKEN_S)
        self._inter_token_s = _Histogram(_INTER_TOKEN_S)
        self._request_s = _Histogram(_REQUEST_S)
        self._prompt_sizes = _Histogram(_one_two_five(max_model_len))
        self._answer_sizes = _Histogram(_one_two_five(max_model_len))
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            # The engine counts from its own start: after a restart it begins at 0, and a counter must not fall.
            before, now = self._scheduler.num_preempted, scheduler.num_preempted
            self._counters.num_preempted += now - before if now >= before else now
            self._scheduler = scheduler
        self._counters.add(iteration)
        if iteration.time_to_first_token_s:
            self._first_token_s.observe_many(iteration.time_to_first_token_s)
        if iteration.inter_token_latency_s:
            self._inter_token_s.observe_many(iteration.inter_token_latency_s)
        if iteration.finished:
            self._record_finished(iteration.finished)

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def log(self) -> None:
        """Nothing: this logger is read, it does not write."""

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All series, and their content type, in the format that an `Accept` header asks for: text or OpenMetrics."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def _record_finished(self, finished: list[FinishedRequestStats]) -> None:
        for request in finished:
            self._finished[request.finish_reason] = self._finished.get(request.finish_reason, 0) + 1
        self._request_s.observe_many(request.e2e_latency_s for request in finished)
        self._prompt_sizes.observe_many(request.num_prompt_tokens for request in finished)
        self._answer_sizes.observe_many(request.num_output_tokens for request in finished)

    # ------------------------------------------------------------------------------------- scraping

    def _families(self) -> Iterator[Metric]:
        scheduler, counters = self._scheduler, self._counters
        used = scheduler.num_blocks - scheduler.num_free_blocks
        usage = used / scheduler.num_blocks if scheduler.num_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests in the batch of the engine.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting in the engine.", scheduler.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, from 0 to 1.", usage)
        yield self._counter(
            "prompt_tokens", "Prompt tokens of requests with a first token.", counters.num_prompt_tokens
        )
        yield self._counter("generation_tokens", "Generated tokens.", counters.num_generation_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that were in the cache.", counters.num_cached_tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.", counters.num_queried_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens that it had.", counters.num_cached_tokens)
        yield self._counter("num_preemptions", "Requests put back to make room for others.", counters.num_preempted)
        restarts = CounterMetricFamily(
            "trio_llm:engine_restarts", "Engines that were started after another one had died.", labels=_LABELS
        )
        restarts.add_metric([self._model_name, self._engine], counters.num_restarts)
        yield restarts
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([self._model_name, self._engine, reason], count)
        yield success
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused for the load, by reason.", labels=["model_name", "reason"]
        )
        for reason, count in self._rejections.items():
            rejections.add_metric([self._model_name, reason], count)
        yield rejections
        yield self._histogram("time_to_first_token_seconds", "Arrival to first token.", self._first_token_s)
        yield self._histogram("inter_token_latency_seconds", "Time between two tokens.", self._inter_token_s)
        yield self._histogram("e2e_request_latency_seconds", "Arrival to end.", self._request_s)
        yield self._histogram("request_prompt_tokens", "Prompt tokens of ended requests.", self._prompt_sizes)
        yield self._histogram("request_generation_tokens", "Generated tokens of ended requests.", self._answer_sizes)
        build = GaugeMetricFamily("trio_llm_build_info", "The version that runs; always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name, self._engine], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name, self._engine], value)
        return family

    def _histogram(self, name: str, text: str, histogram: _Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric([self._model_name, self._engine], histogram.buckets(), histogram.sum)
        return family


class _Families(Collector):
    """The logger's series, which the registry collects at each scrape."""

    def __init__(self, logger: PrometheusStatLogger) -> None:
        self._logger = logger

    def collect(self) -> Iterable[Metric]:
        return self._logger._families()
