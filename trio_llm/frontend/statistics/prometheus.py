"""PrometheusStatLogger: statistics as Prometheus series, under the names that vLLM's dashboards use.

Counts in plain lists and integers, because it is called for every batch of tokens; the exposition format is
made only for a scrape. The output handler records, and the HTTP app renders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class _EngineFigures:
    """What one engine did since the logger was made.

    Args:
        max_model_len: as `PrometheusStatLogger`.
    """

    def __init__(self, max_model_len: int) -> None:
        self.scheduler = SchedulerStats()
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_restarts = 0
        self.finished: dict[str, int] = dict.fromkeys(_FINISH_REASONS, 0)
        self.first_token_s = _Histogram(_FIRST_TOKEN_S)
        self.inter_token_s = _Histogram(_INTER_TOKEN_S)
        self.request_s = _Histogram(_REQUEST_S)
        self.prompt_sizes = _Histogram(_one_two_five(max_model_len))
        self.answer_sizes = _Histogram(_one_two_five(max_model_len))

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Add one drained batch."""
        if scheduler is not None:
            # The engine counts from its own start: after a restart it begins at 0, and a counter must not fall.
            before, now = self.scheduler.num_preempted, scheduler.num_preempted
            self.num_preempted += now - before if now >= before else now
            self.scheduler = scheduler
        self.num_prompt_tokens += iteration.num_prompt_tokens
        self.num_queried_tokens += iteration.num_queried_tokens
        self.num_cached_tokens += iteration.num_cached_tokens
        self.num_generation_tokens += iteration.num_generation_tokens
        self.num_restarts += iteration.num_restarts
        if iteration.time_to_first_token_s:
            self.first_token_s.observe_many(iteration.time_to_first_token_s)
        if iteration.inter_token_latency_s:
            self.inter_token_s.observe_many(iteration.inter_token_latency_s)
        if iteration.finished:
            self._record_finished(iteration.finished)

    def _record_finished(self, finished: list[FinishedRequestStats]) -> None:
        for request in finished:
            self.finished[request.finish_reason] = self.finished.get(request.finish_reason, 0) + 1
        self.request_s.observe_many(request.e2e_latency_s for request in finished)
        self.prompt_sizes.observe_many(request.num_prompt_tokens for request in finished)
        self.answer_sizes.observe_many(request.num_output_tokens for request in finished)

    @property
    def cache_usage(self) -> float:
        """KV blocks in use, from 0 to 1."""
        scheduler = self.scheduler
        num_used = scheduler.num_blocks - scheduler.num_free_blocks
        return num_used / scheduler.num_blocks if scheduler.num_blocks else 0.0


class PrometheusStatLogger:
    """Counts since it was made, for one model. Each engine has series of its own, by the label `engine`.

    Args:
        model_name: value of the label `model_name`.
        max_model_len: tokens; the largest bucket of the histograms of request sizes is at or below it.
    """

    def __init__(self, model_name: str, *, max_model_len: int = 131_072) -> None:
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._engines = {0: _EngineFigures(max_model_len)}
        """By the index of the engine, which is the value of the label. The first one shows before it is heard of."""
        self._rejections: dict[str, int] = dict.fromkeys(_REJECTIONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int = 0) -> None:
        """Add one drained batch."""
        figures = self._engines.get(engine_index)
        if figures is None:
            figures = self._engines[engine_index] = _EngineFigures(self._max_model_len)
        figures.record(scheduler, iteration)

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def log(self) -> None:
        """Nothing: this logger is read, it does not write."""

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All series, and their content type, in the format that an `Accept` header asks for: text or OpenMetrics."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    # ------------------------------------------------------------------------------------- scraping

    def _families(self) -> Iterator[Metric]:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        yield gauge("num_requests_running", "Requests in the batch of the engine.", lambda e: e.scheduler.num_running)
        yield gauge("num_requests_waiting", "Requests waiting in the engine.", lambda e: e.scheduler.num_waiting)
        yield gauge("kv_cache_usage_perc", "KV blocks in use, from 0 to 1.", lambda e: e.cache_usage)
        yield counter(
            "vllm:prompt_tokens", "Prompt tokens of requests with a first token.", lambda e: e.num_prompt_tokens
        )
        yield counter("vllm:generation_tokens", "Generated tokens.", lambda e: e.num_generation_tokens)
        yield counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were in the cache.", lambda e: e.num_cached_tokens
        )
        yield counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens that the prefix cache was asked for.",
            lambda e: e.num_queried_tokens,
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens that it had.", lambda e: e.num_cached_tokens)
        yield counter("vllm:num_preemptions", "Requests put back to make room for others.", lambda e: e.num_preempted)
        yield counter(
            "trio_llm:engine_restarts",
            "Engines that were started after another one had died.",
            lambda e: e.num_restarts,
        )
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for index, figures in self._engines.items():
            for reason, count in figures.finished.items():
                success.add_metric([self._model_name, str(index), reason], count)
        yield success
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused for the load, by reason.", labels=["model_name", "reason"]
        )
        for reason, count in self._rejections.items():
            rejections.add_metric([self._model_name, reason], count)
        yield rejections
        yield histogram("time_to_first_token_seconds", "Arrival to first token.", lambda e: e.first_token_s)
        yield histogram("inter_token_latency_seconds", "Time between two tokens.", lambda e: e.inter_token_s)
        yield histogram("e2e_request_latency_seconds", "Arrival to end.", lambda e: e.request_s)
        yield histogram("request_prompt_tokens", "Prompt tokens of ended requests.", lambda e: e.prompt_sizes)
        yield histogram("request_generation_tokens", "Generated tokens of ended requests.", lambda e: e.answer_sizes)
        build = GaugeMetricFamily("trio_llm_build_info", "The version that runs; always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _gauge(self, name: str, text: str, value_of: Callable[[_EngineFigures], float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for index, figures in self._engines.items():
            family.add_metric([self._model_name, str(index)], value_of(figures))
        return family

    def _counter(self, name: str, text: str, value_of: Callable[[_EngineFigures], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for index, figures in self._engines.items():
            family.add_metric([self._model_name, str(index)], value_of(figures))
        return family

    def _histogram(self, name: str, text: str, histogram_of: Callable[[_EngineFigures], _Histogram]) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for index, figures in self._engines.items():
            histogram = histogram_of(figures)
            family.add_metric([self._model_name, str(index)], histogram.buckets(), histogram.sum)
        return family


class _Families(Collector):
    """The logger's series, which the registry collects at each scrape."""

    def __init__(self, logger: PrometheusStatLogger) -> None:
        self._logger = logger

    def collect(self) -> Iterable[Metric]:
        return self._logger._families()
