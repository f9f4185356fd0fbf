"""Spans in memory, and a collector of OTLP over HTTP on loopback, for tests of traces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trio_llm.frontend.tracing.tracer import SpanTracer

__all__ = ["ENDPOINT", "PARENT_ID", "TRACE_HEADERS", "TRACE_ID", "Collector", "RecordedSpans", "open_collector"]

ENDPOINT = "http://127.0.0.1:9/v1/traces"
"""Nothing listens there; `RecordedSpans` takes its place."""
TRACE_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT_ID = 0x00F067AA0BA902B7
TRACE_HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01", "tracestate": "vendor=value"}


class RecordedSpans:
    """What every tracer opened from now on records, without a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        monkeypatch.setattr(SpanTracer, "open", self._open)

    def _open(self, model_name: str, endpoint: str) -> SpanTracer:
        return SpanTracer(model_name, self.exporter, SimpleSpanProcessor(self.exporter))

    @property
    def requests(self) -> list[ReadableSpan]:
        return self._named("llm_request")

    @property
    def loads(self) -> list[ReadableSpan]:
        return self._named("load_model")

    def _named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


class Collector:
    """Keeps the spans that were sent to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.content_types: set[str | None] = set()
        self.paths: set[str] = set()
        self.exports: list[ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def open_collector(*, is_silent: bool = False) -> Iterator[Collector]:
    """A collector while the block lasts.

    Args:
        is_silent: it reads what it is sent, and never answers.
    """
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if is_silent:
                ended.wait()
                return
            collector.paths.add(self.path)
            collector.content_types.add(self.headers["content-type"])
            collector.exports.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            ended.set()
            server.shutdown()
            thread.join()
