"""Whatever runs beside whatever, and however it is left, aborted, drained or lost: nothing of it stays.

Each seed is one mixture: requests, sessions and maps that share ids, with slow readers, deadlines that pass or move and
limits that are reached, under aborts, stalls, drains and deaths.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.request_checks import open_checked_llm
from trio_llm.errors import TrioLLMError
from trio_llm.frontend.library.bulk import MapResults
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.requests.stream import RequestStream
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing import FakeLLM

NUM_CLIENTS = 25
NUM_FAULTS = 15
SHARED_IDS = ("x", "y")


class Mine(Exception):
    """What the caller's own code raises."""


class Mixture:
    def __init__(self, seed: int, llm: FakeLLM) -> None:
        self._random = random.Random(seed)
        self._llm = llm

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _prompt(self) -> list[int]:
        return [self._random.randrange(1, 200)] * self._random.choice([1, 5, 60])

    async def client(self, number: int) -> None:
        """One of many: begins at some time, and may be cancelled at some time."""
        choose = self._random.choice
        with trio.move_on_after(choose([0.3, 2, 20, 1e5])):
            await trio.sleep(self._random.random() * 20)
            work = choose([self._session, self._map, self._request, self._request])
            with suppress(TrioLLMError, Mine):
                await work(choose([*SHARED_IDS, f"own-{number}"]))

    async def _request(self, request_id: str) -> None:
        choose = self._random.choice
        params = SamplingParams(
            max_tokens=choose([1, 3, 30, 200]),
            n=choose([1, 1, 2, 3]),
            temperature=choose([0, 1]),
            output_kind=choose(list(RequestOutputKind)),
            stop=choose([(), (), ("a",), ("ab", "e")]),
            logprobs=choose([None, 2]),
            prompt_logprobs=choose([None, None, 1]),
        )
        async with AsyncExitStack() as stack:
            stream = self._llm.generate(self._prompt(), params, request_id=request_id)
            # The engine gets this deadline. It holds for the entering alone, or is moved, or holds to the end.
            with trio.CancelScope(deadline=trio.current_time() + choose([0.5, 3, math.inf])) as scope:
                await stack.enter_async_context(stream)
                if self._chance(0.3):
                    await self._read(stream)
                elif self._chance(0.5):
                    scope.deadline = math.inf
                    await self._read(stream)
            if self._chance(0.5):
                await self._read(stream)

    async def _session(self, request_id: str) -> None:
        params = SamplingParams(
            max_tokens=self._random.choice([1, 5, 40]),
            output_kind=self._random.choice([RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]),
        )
        async with self._llm.generate(self._inputs(), params, request_id=request_id) as stream:
            await self._read(stream)

    async def _inputs(self) -> AsyncIterator[StreamingInput]:
        try:
            for _ in range(self._random.randrange(4)):
                if self._chance(0.5):
                    await trio.sleep(self._random.random() * 10)
                yield StreamingInput(self._prompt())
            if self._chance(0.3):
                raise Mine
        finally:
            if self._chance(0.2):
                await trio.sleep(1)
            if self._chance(0.1):
                raise Mine

    async def _map(self, _: str) -> None:
        prompts = [self._prompt() for _ in range(self._random.randrange(9))]
        if self._chance(0.1):
            prompts.append([])
        async with self._llm.map(prompts, max_in_flight=3, ordered=self._chance(0.5), max_tokens=9) as results:
            await self._read(results)

    async def _read(self, outputs: RequestStream | MapResults) -> None:
        async for _ in outputs:
            if self._chance(0.2):
                await trio.sleep(self._random.random() * 5)
            if self._chance(0.03):
                return

    async def faults(self) -> None:
        for _ in range(NUM_FAULTS):
            await trio.sleep(self._random.random() * 4)
            fault = self._random.random()
            if fault < 0.4:
                self._llm.abort(self._random.choice(SHARED_IDS))
            elif fault < 0.5:
                self._llm.fail_next_row()
            elif fault < 0.6:
                self._llm.stall()
                await trio.sleep(3)
                self._llm.resume()
            elif fault < 0.63:
                self._llm.drain()
            elif fault < 0.66:
                self._llm.kill()


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_stays_of_any_mixture(
    seed: int, autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    choose = random.Random(-seed).choice
    settings: dict[str, Any] = {
        "max_num_queued_tokens": choose([None, 20, 100]),
        "max_num_queued_reqs": choose([None, 3, 8]),
        "max_num_seqs": choose([1, 3, 64]),
        "num_gpu_blocks_override": choose([40, 200]),
    }
    async with open_checked_llm(step_s=0.1, max_model_len=1000, **settings) as llm:
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        mixture = Mixture(seed, llm)

        async with trio.open_nursery() as nursery:
            for number in range(NUM_CLIENTS):
                nursery.start_soon(mixture.client, number)
            nursery.start_soon(mixture.faults)

        with trio.fail_after(1000):
            await llm.assert_idle()
        await trio.testing.wait_all_tasks_blocked()
        # The output handler and the watch end with the engine.
        assert trio.lowlevel.current_statistics().tasks_living == num_tasks - 2 * (llm.dead_error is not None)
        assert llm._submitter._sessions == set()
        assert list(recwarn) == []
        if llm.is_running:
            llm._executor.faults.clear()
            assert len((await llm.complete([1], max_tokens=3)).outputs[0].token_ids) == 3
    # An error in our own code would be logged there.
    unexpected = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in unexpected if "is dead: " not in record.getMessage()] == []
