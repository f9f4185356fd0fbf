"""SpanTracer: one span per request, sent to a collector as OTLP over HTTP. Needs the extra `otel`.

An observer of requests, and a listener of engines, whose starts are spans, too. A span is made when what it tells of
is over, so that nothing is done per token. OpenTelemetry's batch processor sends from a thread of its own; a collector
that does not answer costs spans, never a request.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import trio
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.frontend.tracing.spans import request_attributes
from trio_llm.version import __version__
from trio_llm.wire.messages import EngineCoreRequest

if TYPE_CHECKING:
    from trio_llm.errors import EngineDeadError
    from trio_llm.frontend.control.engine import Engine

__all__ = ["SpanTracer"]

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 3.0
"""Seconds that the collector gets at the end for what was not sent yet."""
_NS_PER_S: Final = 1_000_000_000


class SpanTracer:
    """Implements `RequestObserver` and `EngineListener`.

    Args:
        model_name: for the attribute `gen_ai.request.model`.
        exporter: where the spans go.
        processor: hands them to the exporter. None: in batches, by a thread.
    """

    def __init__(self, model_name: str, exporter: SpanExporter, processor: SpanProcessor | None = None) -> None:
        self._model_name = model_name
        self._exporter = exporter
        # Not the provider that programs set for the whole process: each `open_llm` has its own, and its own end.
        self._provider = TracerProvider(resource=_make_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trio_llm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, model_name: str, endpoint: str) -> SpanTracer:
        """One that sends to a collector.

        Args:
            endpoint: the whole URL that takes traces.
        """
        return cls(model_name, OTLPSpanExporter(endpoint=endpoint))

    async def aclose(self) -> None:
        """Send what was not sent yet, for three seconds at most, and end the thread.

        Cancellation: not before that time is over.
        """
        with trio.move_on_after(_FLUSH_S, shield=True) as scope:
            await trio.to_thread.run_sync(
                self._provider.shutdown, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
            )
        if scope.cancelled_caught:
            logger.warning("the collector of traces took longer than %g s: the last spans are lost", _FLUSH_S)
            self._exporter.shutdown()  # no further attempt, so that the thread ends

    # -------------------------------------------------------------------------------------- requests

    def on_arrival(self, report: RequestReport, request: EngineCoreRequest, text: str | None) -> None:
        """Find the parent: what the headers name, else the span that the caller's task is in."""
        context = self._propagator.extract(report.trace_headers or {}, context=Context())
        if not context:
            context = set_span_in_context(get_current_span(), Context())
        report.trace_context = context

    def on_end(self, report: RequestReport) -> None:
        """Record the span `llm_request`, from the arrival until now."""
        assert isinstance(report.trace_context, Context)
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=report.trace_context,
            kind=SpanKind.SERVER,
            attributes=request_attributes(report, self._model_name),
            start_time=end_ns - round(report.e2e_latency_s * _NS_PER_S),
        )
        if report.has_failed:
            reason = None if report.error is None else f"{type(report.error).__name__}: {report.error}"
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end(end_ns)

    # -------------------------------------------------------------------------------------- engines

    def on_ready(self, engine: Engine) -> None:
        """Record the span `load_model`, from the start of this incarnation until now."""
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "load_model",
            context=Context(),
            attributes={
                "gen_ai.request.model": self._model_name,
                "trio_llm.engine_index": engine.index,
                "trio_llm.num_restarts": engine.num_restarts,
            },
            start_time=end_ns - round(engine.monitor.status().elapsed_s * _NS_PER_S),
        )
        span.end(end_ns)

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing: its requests go on."""

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Nothing: its requests end, each with its span."""


def _make_resource() -> Resource:
    """What all spans say of this process. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` count more."""
    found = Resource.create()
    own = {SERVICE_VERSION: __version__}
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return found.merge(Resource({**own, SERVICE_NAME: "trio-llm"}))
    return Resource(own).merge(found)
