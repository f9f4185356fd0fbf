"""The options of `trio-llm chat`, one alias each: name and help text. Used by cli/main.py, which has their defaults."""

from __future__ import annotations

from typing import Annotated

import typer

from trio_llm.cli.value_parsers import parse_count, parse_temperature

URL = Annotated[str, typer.Argument(metavar="URL", help="Address of the server.", show_default=True)]
Question = Annotated[
    str | None,
    typer.Option("--question", "-q", metavar="TEXT", help="Ask this one question, print the answer and end."),
]
SystemPrompt = Annotated[
    str | None, typer.Option("--system-prompt", metavar="TEXT", help="Instructions for the model, before the chat.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Name of the model.", show_default="the first one of the server"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        parser=parse_count,
        metavar="N",
        help="Longest answer, in tokens.",
        show_default="the rest of the context",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        parser=parse_temperature,
        metavar="T",
        help="From 0, always the likeliest word, to 2.",
        show_default="the server's",
    ),
]
