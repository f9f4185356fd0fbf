"""What is done with an engine while it is cancelled at every checkpoint: over the in-memory link and over zmq.

Each ends by itself in a few steps, if nobody cancels it, on an engine with room for four requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.sampling import SamplingParams

__all__ = ["SHORT", "WORKLOADS", "generate_to_the_end"]

SHORT = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=3000)
"""So long that it is still running when it is left."""


async def generate_to_the_end(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SHORT) as stream:
        async for _ in stream:
            pass


async def leave_in_the_middle(llm: AsyncLLM) -> None:
    async with llm.generate("hello", LONG) as stream:
        await anext(stream)
        await anext(stream)


async def abort_by_id(llm: AsyncLLM) -> None:
    async with llm.generate("hello", LONG, request_id="x") as stream:
        await anext(stream)
        llm.abort("x")
        async for _ in stream:
            pass


async def two_side_by_side(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SHORT) as first, llm.generate("hello", SHORT) as second:
        await anext(first)
        await anext(second)


async def several_choices(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SamplingParams(max_tokens=6, n=3)) as stream:
        async for _ in stream:
            pass


async def leave_several_choices(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SamplingParams(max_tokens=3000, n=3), request_id="x") as stream:
        await anext(stream)
        await anext(stream)
        llm.abort("x")
        await anext(stream)


async def session(llm: AsyncLLM) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        for text in ("hello", "again"):
            await trio.lowlevel.checkpoint()
            yield StreamingInput(text, SHORT)

    async with llm.generate(inputs()) as stream:
        async for _ in stream:
            pass


async def check_health(llm: AsyncLLM) -> None:
    await llm.check_health()


WORKLOADS: dict[Callable[[AsyncLLM], Awaitable[None]], int] = {
    generate_to_the_end: 5,
    leave_in_the_middle: 3,
    abort_by_id: 3,
    two_side_by_side: 4,
    several_choices: 4,
    leave_several_choices: 3,
    session: 4,
    check_health: 2,
}
"""Each with the fewest checkpoints that it must have, or it was hardly interrupted anywhere."""
