"""run_in_order: the same work on several inputs at a time. Used wherever answers are wanted together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from trio_llm.frontend.exception_groups import unwrap_single

__all__ = ["run_in_order"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")


async def run_in_order(work: Callable[[_In], Awaitable[_Out]], inputs: Sequence[_In]) -> list[_Out]:
    """The results for all inputs, worked on at the same time, in the order of the inputs.

    Cancellation: every piece of work is cancelled.

    Raises:
        Exception: what the first work that failed raised; the others are cancelled. Errors of the same moment come as a
            group.
    """
    results: dict[int, _Out] = {}

    async def run(index: int) -> None:
        results[index] = await work(inputs[index])

    with unwrap_single():
        async with trio.open_nursery() as nursery:
            for index in range(len(inputs)):
                nursery.start_soon(run, index)
    return [results[index] for index in range(len(inputs))]
