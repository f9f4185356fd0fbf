"""What the loggers get about the prefix cache, from the real scheduler through the front end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.fake_llm import open_fake_llm
from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.sampling import SamplingParams

PROMPT = list(range(70))
NUM_WHOLE_BLOCKS = 64
GREEDY = SamplingParams(max_tokens=2, temperature=0)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"n": 3, "seed": 1}, {"n": 3, "temperature": 0}], ids=["one", "sampled", "greedy"]
)
async def test_each_prompt_is_one_query_and_one_hit_however_many_choices_it_has(params: dict[str, Any]) -> None:
    notes = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[notes]) as fake:
        for _ in range(3):
            await fake.llm.complete(PROMPT, max_tokens=2, **params)

    assert (notes.num_queried_tokens, notes.num_cached_tokens, notes.num_prompt_tokens) == (
        3 * 70,
        2 * NUM_WHOLE_BLOCKS,
        3 * 70,
    )


async def test_later_inputs_of_a_session_are_no_queries() -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        for _ in range(3):
            yield StreamingInput(PROMPT)

    notes = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[notes]) as fake:
        await fake.llm.complete(PROMPT, GREEDY)
        async with fake.llm.generate(inputs(), GREEDY) as stream:
            async for _ in stream:
                pass

    assert (notes.num_queried_tokens, notes.num_cached_tokens, notes.num_prompt_tokens) == (
        2 * 70,
        NUM_WHOLE_BLOCKS,
        4 * 70,
    )


async def test_blocks_that_wait_in_the_cache_count_as_free() -> None:
    notes = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[notes]) as fake:
        await fake.llm.complete(PROMPT, GREEDY)
        await fake.assert_nothing_is_left()
        scheduler = notes.scheduler

    assert scheduler is not None
    assert scheduler.num_cached_blocks == NUM_WHOLE_BLOCKS // 32
    assert scheduler.num_free_blocks == scheduler.num_blocks > 0


async def test_a_vector_asks_the_cache_for_its_prompt_as_an_answer_does() -> None:
    notes = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[notes]) as fake:
        for _ in range(2):
            await fake.llm.encode(PROMPT)

    assert (notes.num_queried_tokens, notes.num_cached_tokens) == (2 * 70, NUM_WHOLE_BLOCKS)
