"""checked_requests: assert the invariants of the requests whenever a task has made a step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.testing import FakeLLM, open_fake_llm

__all__ = ["checked_requests", "open_checked_llm"]


class _Checks(trio.abc.Instrument):
    def __init__(self, registry: RequestRegistry) -> None:
        self._registry = registry
        self.error: AssertionError | None = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.error is None:
            try:
                self._registry.check()
            except AssertionError as error:
                self.error = error


@contextmanager
def checked_requests(llm: AsyncLLM) -> Iterator[None]:
    """Run `RequestRegistry.check` after every step of any task; the end of the block raises its first error."""
    checks = _Checks(llm._registry)
    trio.lowlevel.add_instrument(checks)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(checks)
        if checks.error is not None:
            raise checks.error


@asynccontextmanager
async def open_checked_llm(**settings: Any) -> AsyncIterator[FakeLLM]:
    """As `trio_llm.testing.open_fake_llm`, with `checked_requests`."""
    async with open_fake_llm(**settings) as llm:
        with checked_requests(llm):
            yield llm
