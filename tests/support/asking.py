"""Whole answers of an engine client, for tests that look at what comes and not at how it is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import trio

from trio_llm.frontend.engine_client import EngineClient
from trio_llm.outputs import RequestOutput

BOUND_S = 1000
"""No answer of a test takes so long, by a mock clock neither, unless something is broken."""


async def ask(llm: EngineClient, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    """Every output of one request, to its end. Arguments: as `generate`."""
    with trio.fail_after(BOUND_S):
        async with llm.generate(*args, **kwargs) as stream:
            return [output async for output in stream]


def token_ids(outputs: Iterable[RequestOutput]) -> list[int]:
    """The tokens of a request with one choice."""
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]
