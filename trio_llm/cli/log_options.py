"""The options of `trio-llm serve` that say what is written to the log and what is traced; otherwise as `options`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trio_llm.cli.value_parsers import parse_count

_LOGS = "Logs and traces"

LogLevelName = Literal["debug", "info", "warning", "error"]

LogLevel = Annotated[
    LogLevelName,
    typer.Option(
        "--log-level",
        metavar="NAME",
        help="Least severe log line to write: debug, info, warning or error.",
        rich_help_panel=_LOGS,
    ),
]
DisableLogStats = Annotated[
    bool,
    typer.Option(
        "--disable-log-stats",
        help="Compute no statistics: no line every ten seconds, and nothing of the engines in /metrics.",
        rich_help_panel=_LOGS,
    ),
]
EnableLogRequests = Annotated[
    bool,
    typer.Option(
        "--enable-log-requests",
        help="Log each request also when it arrives, with its parameters; with --log-level debug its prompt, too.",
        rich_help_panel=_LOGS,
    ),
]
MaxLogLen = Annotated[
    int | None,
    typer.Option(
        "--max-log-len",
        parser=parse_count,
        metavar="N",
        help="Characters, and ids of tokens, that the log shows of a prompt.",
        show_default="all",
        rich_help_panel=_LOGS,
    ),
]
OTLPTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OpenTelemetry collector that gets a span of each request, as OTLP over HTTP.",
        show_default="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else no traces",
        rich_help_panel=_LOGS,
    ),
]
