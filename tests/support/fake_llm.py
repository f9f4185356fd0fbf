"""FakeLLM as the tests of the front end use it: a small KV cache, all tokens, and its parts in reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.support.request_checks import checked_requests
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.testing import fake_llm
from trio_llm.testing.answers import END, LOGITS_WIDTH
from trio_llm.testing.fake_llm import FakeLLM
from trio_llm.testing.in_memory import InMemoryCoreClient

__all__ = ["FakeSetUp", "open_fake_llm"]


class FakeSetUp:
    """The AsyncLLM and what is behind it."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm
        self.core: InMemoryCoreClient = llm.core

    async def assert_nothing_is_left(self) -> None:
        """Every map of the front end is empty, the engine is idle, and all its blocks are free."""
        await self.llm.wait_idle()
        await self.llm.assert_idle()


@asynccontextmanager
async def open_fake_llm(
    *,
    num_blocks: int = 128,
    engine: Mapping[str, Any] | None = None,
    wait_until_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[FakeSetUp]:
    """`engine` and `settings`: as `trio_llm.testing.open_fake_llm`. Requests are checked after every step of a task."""
    settings = {"num_gpu_blocks_override": num_blocks, **(engine or {}), **settings}
    async with fake_llm.open_fake_llm(wait_until_ready=wait_until_ready, **settings) as llm:
        llm._executor._choices = [token_id for token_id in range(LOGITS_WIDTH) if token_id != END]
        if wait_until_ready:
            # FakeLLM's own has no threads; here they are under test, too.
            own = llm.renderer
            renderer = Renderer(own.tokenizer, own._template, max_model_len=own._max_model_len)
            assert llm._model is not None
            llm._model = replace(llm._model, renderer=renderer)
        with checked_requests(llm):
            yield FakeSetUp(llm)
