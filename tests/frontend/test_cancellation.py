"""Cancelling anything of AsyncLLM at any checkpoint leaves nothing behind, and the next request works."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from tests.support.workloads import SHORT, WORKLOADS
from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.sampling import SamplingParams


async def generate_a_big_prompt(llm: AsyncLLM) -> None:
    # Long enough to become tokens in a worker thread.
    async with llm.generate("hello " * 900, SamplingParams(max_tokens=1)) as stream:
        async for _ in stream:
            pass


async def fail(llm: AsyncLLM) -> None:
    with pytest.raises(EngineGenerateError):
        async with llm.generate([7], SHORT) as stream:
            async for _ in stream:
                pass


async def several_greedy_choices(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SamplingParams(max_tokens=6, n=3, temperature=0)) as stream:
        async for _ in stream:
            pass


async def wait_for_idleness(llm: AsyncLLM) -> None:
    async with llm.generate("hello", SHORT):
        await llm.wait_idle()


async def check_the_next_request(fake: FakeSetUp) -> None:
    await fake.assert_nothing_is_left()
    async with fake.llm.generate("hello", SHORT) as stream:
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
    await fake.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("work", "least"),
    [
        *WORKLOADS.items(),
        (generate_a_big_prompt, 3),
        (fail, 3),
        (several_greedy_choices, 4),
        (wait_for_idleness, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_cancelling_at_every_checkpoint_leaves_nothing_behind(
    work: Callable[[AsyncLLM], Awaitable[None]], least: int
) -> None:
    async with open_fake_llm(failing_row_prompt=7, num_blocks=200, max_model_len=6000) as fake:
        num_checkpoints = await cancel_at_every_checkpoint(lambda: work(fake.llm), lambda: check_the_next_request(fake))

        assert num_checkpoints >= least, "so few checkpoints that the work was hardly interrupted anywhere"


async def test_cancelling_the_wait_for_the_model_lets_it_load_on() -> None:
    async with open_fake_llm(wait_until_ready=False) as fake:

        async def wait() -> None:
            await fake.llm.wait_until_ready()
            assert fake.llm.is_running

        assert await cancel_at_every_checkpoint(wait, trio.lowlevel.checkpoint) >= 2

        await check_the_next_request(fake)
