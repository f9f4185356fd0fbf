"""The options of `trio-llm serve` about several engines, as those in options.py. Used by cli/main.py."""

from __future__ import annotations

from typing import Annotated

import typer

from trio_llm.cli.value_parsers import parse_count

_PARALLEL = "Several engines"

DataParallelSize = Annotated[
    int,
    typer.Option(
        "--data-parallel-size",
        parser=parse_count,
        metavar="N",
        help="Engines that run the same model, each in a process of its own; requests are shared out among them.",
        rich_help_panel=_PARALLEL,
    ),
]
DataParallelRank = Annotated[
    int | None,
    typer.Option(
        "--data-parallel-rank",
        parser=parse_count,
        metavar="R",
        help="Start the engine of this rank alone: one server per rank, and a balancer of yours in front of them.",
        show_default="all of them, balanced by this server",
        rich_help_panel=_PARALLEL,
    ),
]
DataParallelExternalLB = Annotated[
    bool,
    typer.Option(
        "--data-parallel-external-lb",
        help="There is a balancer in front of the servers. Implied by --data-parallel-rank.",
        rich_help_panel=_PARALLEL,
    ),
]
DisablePrefixAffinity = Annotated[
    bool,
    typer.Option(
        "--disable-prefix-affinity",
        help="Do not prefer engines that have computed the beginning of a prompt.",
        rich_help_panel=_PARALLEL,
    ),
]
