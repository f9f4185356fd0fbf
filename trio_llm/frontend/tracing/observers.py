"""RequestObservers: the log lines and the spans of one client's requests, as its configuration asks for them.

Owned by `RequestSubmitter`, which tells it of arrivals; reports tell it of their ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trio_llm.config import EngineConfig, default_model_name, traces_endpoint
from trio_llm.errors import ConfigError
from trio_llm.frontend.tracing.report import RequestObserver, RequestReport
from trio_llm.frontend.tracing.request_log import RequestLog
from trio_llm.wire.messages import EngineCoreRequest

if TYPE_CHECKING:
    from trio_llm.errors import EngineDeadError
    from trio_llm.frontend.control.engine import Engine
    from trio_llm.frontend.tracing.tracer import SpanTracer

__all__ = ["RequestObservers", "check_tracing", "open_observers"]

logger = logging.getLogger(__name__)


class RequestObservers:
    """Tells each observer of requests. One that raises is told nothing more. Also an `EngineListener`.

    Args:
        tracer: one of the observers; None: no spans are recorded.
    """

    def __init__(self, log: RequestLog, tracer: SpanTracer | None = None) -> None:
        self._observers: list[RequestObserver] = [log] if tracer is None else [log, tracer]
        self._tracer = tracer
        self._has_warned = False

    @property
    def is_tracing(self) -> bool:
        """Spans are recorded for requests."""
        return self._tracer is not None and self._tracer in self._observers

    def on_arrival(self, report: RequestReport, request: EngineCoreRequest, text: str | None) -> None:
        """A request was admitted."""
        if report.trace_headers and not self.is_tracing and not self._has_warned:
            self._has_warned = True
            logger.warning("a request came with trace headers, but no traces are sent; set --otlp-traces-endpoint")
        for observer in list(self._observers):
            self._call(observer, partial(observer.on_arrival, report, request, text))

    def on_end(self, report: RequestReport) -> None:
        """An admitted request is over."""
        for observer in list(self._observers):
            self._call(observer, partial(observer.on_end, report))

    def _call(self, observer: RequestObserver, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("%r failed and observes no requests from now on", observer)
            self._observers.remove(observer)

    async def aclose(self) -> None:
        """Send the last spans. Cancellation: as `SpanTracer.aclose`, three seconds at most."""
        if self._tracer is not None:
            await self._tracer.aclose()

    # ------------------------------------------------------------------------- as an EngineListener

    def on_ready(self, engine: Engine) -> None:
        """Let the tracer record the start."""
        if self._tracer is not None and self.is_tracing:
            self._call(self._tracer, partial(self._tracer.on_ready, engine))

    def on_lost(self, engine: Engine, reason: str) -> None:
        """Nothing."""

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        """Nothing."""


def open_observers(config: EngineConfig) -> RequestObservers:
    """
    Raises:
        ConfigError: traces are asked for, and OpenTelemetry is not installed.
    """
    log = RequestLog(logs_arrivals=config.enable_log_requests, max_len=config.max_log_len)
    endpoint = traces_endpoint(config)
    tracer = None if endpoint is None else _load_tracer().open(default_model_name(config), endpoint)
    return RequestObservers(log, tracer)


def check_tracing(config: EngineConfig) -> None:
    """Raise what `open_observers` would, for a process that starts others which open them."""
    if traces_endpoint(config) is not None:
        _load_tracer()


def _load_tracer() -> type[SpanTracer]:
    try:
        # Here, since OpenTelemetry is an extra, and a fifth of a second for those who do not need it.
        from trio_llm.frontend.tracing.tracer import SpanTracer
    except ImportError as error:
        raise ConfigError(
            "traces are to be sent (--otlp-traces-endpoint or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT), and OpenTelemetry "
            f"is not installed ({error}); install it: pip install 'trio-llm[otel]'"
        ) from error
    return SpanTracer
