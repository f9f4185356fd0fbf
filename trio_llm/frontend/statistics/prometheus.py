"""PrometheusStatLogger: statistics as Prometheus series, under the names that vLLM's dashboards use.

Counts in plain data, because it is called for every batch of tokens; the exposition format is made only for a scrape.
The output handler records, the HTTP app records requests and renders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from trio_llm.frontend.statistics.histogram import HTTP_S_BY_HANDLER, make_histogram
from trio_llm.frontend.statistics.metric_counts import (
    EngineCounts,
    HandlerCounts,
    MetricsSnapshot,
    OperationCounts,
    make_engine_counts,
    merge,
)
from trio_llm.frontend.statistics.metric_families import make_families
from trio_llm.frontend.statistics.stats import IterationStats, StatLogger
from trio_llm.wire.messages import ModelConfig, SchedulerStats

__all__ = ["PrometheusStatLogger"]

_OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MAX_MODEL_LEN: Final = 131_072
"""Of a model that is not known yet."""


class PrometheusStatLogger(StatLogger):
    """Counts since it was made, for one model. Each engine has series of its own, by the label `engine`.

    Args:
        model_name: value of the label `model_name`.
        max_model_len: tokens; the largest bucket of the histograms of request sizes is at or below it. None: as the
            model says when it is loaded.
        engine_indices: ranks of the engines that show before they are heard of.
        has_engine_stats: False: it is given no statistics of engines, and shows no series of them.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int | None = None,
        engine_indices: Sequence[int] = (0,),
        has_engine_stats: bool = True,
    ) -> None:
        self._max_model_len = max_model_len
        self._counts = MetricsSnapshot(model_name, has_engine_stats)
        for index in engine_indices if has_engine_stats else ():
            self._engine(index)
        self.collect_others: Callable[[], Awaitable[Sequence[MetricsSnapshot]]] = _collect_none
        """What other front ends of the same engines have counted. Set by the owner, if there are any."""
        self._process = CollectorRegistry(auto_describe=False)
        for make_collector in (ProcessCollector, PlatformCollector, GCCollector):
            make_collector(registry=self._process)

    def _engine(self, index: int) -> EngineCounts:
        counts = self._counts.engines.get(index)
        if counts is None:
            counts = self._counts.engines[index] = make_engine_counts(self._max_model_len or _MAX_MODEL_LEN)
        return counts

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int = 0) -> None:
        """Add one drained batch."""
        self._engine(engine_index).record(scheduler, iteration)

    def record_rejection(self, reason: str) -> None:
        """Add one request that was refused."""
        rejections = self._counts.rejections
        rejections[reason] = rejections.get(reason, 0) + 1

    def record_engine_ready(self, model: ModelConfig, *, engine_index: int) -> None:
        """Show its KV cache."""
        sizes_up_to = model.max_model_len if self._max_model_len is None else None
        self._engine(engine_index).record_ready(model, sizes_up_to=sizes_up_to)

    def record_operation(self, operation: str, seconds: float | None) -> None:
        """Count a call that begins, or measure one that is over."""
        counts = self._counts.operations.setdefault(operation, OperationCounts())
        if seconds is None:
            counts.num_in_flight += 1
        else:
            counts.num_in_flight -= 1
            counts.durations.observe(seconds)

    def record_http(
        self,
        *,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_bytes: int,
        response_bytes: int | None,
    ) -> None:
        """Add one HTTP request.

        Args:
            handler: the path of its route.
            response_bytes: None: a stream, whose length is not counted.
        """
        http = self._counts.http
        counts = http.handlers.get(handler)
        if counts is None:
            counts = http.handlers[handler] = HandlerCounts()
        by_status = counts.requests.setdefault(method, {})
        status_class = f"{status // 100}xx"
        by_status[status_class] = by_status.get(status_class, 0) + 1
        if method not in counts.durations:
            counts.durations[method] = make_histogram(HTTP_S_BY_HANDLER)
        counts.durations[method].observe(seconds)
        http.durations.observe(seconds)
        counts.request_bytes.add(request_bytes)
        if response_bytes is not None:
            counts.response_bytes.add(response_bytes)

    # ------------------------------------------------------------------------------------- scraping

    def snapshot(self) -> MetricsSnapshot:
        """All that was counted, as plain data that changes no more."""
        return self._counts.copy()

    def render(self, accept: str = "", *, others: Sequence[MetricsSnapshot] = ()) -> tuple[bytes, str]:
        """All series, and their content type, in the format that an `Accept` header asks for: text or OpenMetrics.

        Args:
            others: of front ends that serve the same engines: what all of them count together is shown. Series of the
                process are those of this one.

        Raises: as `merge`.
        """
        registry = CollectorRegistry(auto_describe=False)
        counts = merge([self._counts, *others]) if others else self._counts
        registry.register(_Families(counts, self._process))
        if choose_encoder(accept)[1].startswith("application/openmetrics-text"):
            return _generate_open_metrics(registry), _OPEN_METRICS
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _generate_open_metrics(registry: CollectorRegistry) -> bytes:
    # By default prometheus_client writes `_` for the `:` in names of samples, but not in those of families. Ours need
    # no escaping.
    return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-any-return, no-untyped-call]


async def _collect_none() -> Sequence[MetricsSnapshot]:
    return ()


class _Families(Collector):
    """A snapshot and the series of the process, for a registry that collects them."""

    def __init__(self, snapshot: MetricsSnapshot, process: CollectorRegistry) -> None:
        self._snapshot = snapshot
        self._process = process

    def collect(self) -> Iterable[Metric]:
        return chain(make_families(self._snapshot), self._process.collect())
