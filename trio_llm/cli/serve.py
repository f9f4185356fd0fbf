"""`trio-llm serve`: an engine and a server, from the command line to the exit code.

The server answers before the engine is ready. A signal or the engine's death stops the server, which drains; then the
engine is stopped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol, TextIO

import trio

from trio_llm.cli.banner import banner
from trio_llm.cli.output import make_output_lenient
from trio_llm.cli.progress import open_progress
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import ConfigError
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.gc_tuning import tune_gc
from trio_llm.frontend.http.model_names import model_names
from trio_llm.frontend.http.serve import serve
from trio_llm.frontend.http.server.listeners import Listeners, open_listeners
from trio_llm.frontend.http.server.signals import hard_exit_after, stop_on_signals
from trio_llm.frontend.open_llm import make_cores, open_llm
from trio_llm.frontend.statistics.loggers import make_metrics
from trio_llm.frontend.statistics.logging_logger import LoggingStatLogger
from trio_llm.frontend.statistics.stats import StatLogger
from trio_llm.frontend.tracing.observers import check_tracing
from trio_llm.supervisor.shared_load import open_load_file
from trio_llm.supervisor.supervisor import Supervisor
from trio_llm.wire.messages import ModelConfig

__all__ = ["run_server", "serve_engine", "supervise"]

_REFRESH_S: Final = 0.1
"""Seconds between two updates of the start-up display."""
_ENDING_S: Final = 15.0
"""Seconds that the end may take after the drain, for last events, handlers and the engine. Then the kernel kills us."""


def run_server(engine: EngineConfig, server: ServerConfig, *, log_level: str) -> int:
    """Serve until a signal (returns 0) or an error.

    Raises:
        ConfigError: the server cannot listen there, two settings exclude each other, or traces cannot be sent.
        EngineStartupError: the engine ended before it was ready.
        EngineDeadError: the engine died later, and the server is not to outlive it.
    """
    if server.enable_per_request_metrics and engine.disable_log_stats:
        raise ConfigError(
            "--enable-per-request-metrics needs what --disable-log-stats turns off; leave out one of them"
        )
    make_output_lenient()
    logging.basicConfig(
        level=log_level.upper(), handlers=[_StderrHandler()], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Hypercorn's "Running on" says less than the banner, and comes too early.
    logging.getLogger("trio_llm.hypercorn").setLevel(logging.WARNING)
    try:
        with open_listeners(server) as listeners:
            if server.api_server_count > 1:
                check_tracing(engine)
                trio.run(partial(supervise, engine, server, listeners=listeners, log_level=log_level))
            else:
                trio.run(partial(serve_engine, engine, server, listeners=listeners))
    finally:
        hard_exit_after(0)
    return 0


async def serve_engine(engine: EngineConfig, server: ServerConfig, *, listeners: Listeners) -> None:
    """Start the server, then the engine, and run both until SIGTERM, SIGINT or the engine's death. Prints the progress.

    Cancellation: stops both; takes up to about four seconds.

    Raises: as `run_server`.
    """
    name = model_names(engine, server)[0]
    metrics = make_metrics(engine, name)
    stat_loggers: list[StatLogger] = [] if engine.disable_log_stats else [metrics, LoggingStatLogger()]
    stop = trio.Event()
    with unwrap_single():
        async with (
            open_llm(
                engine,
                wait_until_ready=False,
                stat_loggers=stat_loggers,
                keep_alive_on_engine_death=server.keep_alive_on_engine_death,
            ) as llm,
            trio.open_nursery() as nursery,
        ):

            async def run_http(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(llm, server, metrics=metrics, listeners=listeners, stop=stop, task_status=task_status)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_on_signals, stop)
            nursery.start_soon(_end_in_time, stop, server.drain_timeout_s)
            urls = await nursery.start(run_http)
            await _show_start_up(llm, sys.stderr)
            tune_gc()
            _print_banner(llm.model_config, engine, server, urls=urls, elapsed_s=llm.status.elapsed_s)


async def supervise(engine: EngineConfig, server: ServerConfig, *, listeners: Listeners, log_level: str) -> None:
    """Start the engines and `server.api_server_count` front-end processes, and run them until a signal or a death.

    Cancellation: ends all of them; takes up to about four seconds.

    Raises: as `run_server`, and FrontEndDeadError if a front end dies too often.
    """
    stop = trio.Event()
    with unwrap_single(), open_load_file(server.api_server_count) as load_fd:
        supervisor = Supervisor(
            make_cores(engine),
            engine,
            server,
            listener_fds=[one.fileno() for one in listeners.sockets],
            load_fd=load_fd,
            log_level=log_level,
        )
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                await supervisor.run(stop)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_on_signals, stop)
            nursery.start_soon(_end_in_time, stop, server.drain_timeout_s)
            nursery.start_soon(run)
            await _show_start_up(supervisor, sys.stderr)
            elapsed_s = supervisor.status.elapsed_s
            _print_banner(supervisor.model, engine, server, urls=listeners.urls, elapsed_s=elapsed_s)


class _Starting(Protocol):
    """What is started: an engine with its front end, or a supervisor."""

    @property
    def status(self) -> EngineStatus: ...

    async def wait_until_ready(self) -> None: ...


async def _show_start_up(what: _Starting, stream: TextIO) -> None:
    """Return when it is ready. Cancellation: safe. Raises: EngineStartupError."""
    with open_progress(stream) as view:
        while True:
            view.update(what.status)
            with trio.move_on_after(_REFRESH_S):
                await what.wait_until_ready()
                return


def _print_banner(
    model: ModelConfig, engine: EngineConfig, server: ServerConfig, *, urls: Sequence[str], elapsed_s: float
) -> None:
    name = model_names(engine, server)[0]
    print(banner(model, name=name, urls=urls, elapsed_s=elapsed_s, asked_len=engine.max_model_len), flush=True)


async def _end_in_time(stop: trio.Event, drain_timeout_s: float) -> None:
    """Limit the time of a stop, also if Python hangs. Cancellation: safe; a limit that was set stays."""
    await stop.wait()
    hard_exit_after(drain_timeout_s + _ENDING_S)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the present `sys.stderr`: a progress bar replaces it for a time, and prints lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
