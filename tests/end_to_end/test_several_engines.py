"""Several engine processes behind one front end, with a fake device: one dies for good, and the others go on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.end_to_end.conftest import fake_engine, start_fake_server
from tests.end_to_end.servers import FAKE_ENGINE_COUNT, is_alive, open_stream, wait_until
from tests.end_to_end.test_deaths import BOUND_S, REQUESTS, Readers, folder, undisturbed
from trio_llm import SamplingParams, open_llm
from trio_llm.frontend.core_client.one_engine import OneEngineClient
from trio_llm.frontend.core_client.restarting import RestartingClient

__all__ = ["folder"]  # a fixture


async def test_an_engine_that_is_killed_for_good_costs_no_stream_a_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    FAKE_ENGINE_COUNT.extend(["one of two is killed for good"] * 2)
    config = fake_engine(step_s=0.01, data_parallel_size=2, max_engine_restarts=0)
    requests = [*REQUESTS, *((f"another {seed}", SamplingParams(seed=seed, max_tokens=80)) for seed in range(12))]
    with trio.fail_after(BOUND_S):
        async with open_llm(config) as llm, trio.open_nursery() as nursery:
            pids = []
            for engine in llm._engines:
                assert isinstance(engine.core, RestartingClient)
                assert isinstance(engine.core.current, OneEngineClient)
                pids.append(engine.core.current.pid or 0)
            readers = Readers(llm, requests)
            for number in range(len(requests)):
                nursery.start_soon(readers.read, number)
            await wait_until(lambda: min(readers.num_outputs) >= 3)
            engines_before = {request.engine_index for request in llm._registry.in_flight.values()}

            os.kill(pids[0], signal.SIGKILL)

            assert await readers.wait() == await undisturbed(requests)
            assert engines_before == {0, 1}
            assert [engine.is_dead for engine in llm._engines] == [True, False]
            assert llm.status.state == "ready"
            await llm.check_health()
            assert (await llm.complete("after", max_tokens=3)).finished
            counts = await llm.check_scheduler()
            assert counts["num_free_blocks"] == counts["num_blocks"], counts
    assert not any(is_alive(pid) for pid in pids)


def requests_by_engine(metrics: str) -> dict[str, float]:
    """Requests that ended by their length, by the label `engine`."""
    found = re.findall(r'^vllm:request_success_total\{(.*finished_reason="length".*)\} (.*)$', metrics, re.MULTILINE)
    return {re.search(r'engine="(\d+)"', labels)[1]: float(value) for labels, value in found}  # type: ignore[index]


async def test_a_server_of_two_engines_obeys_ranks_shows_both_and_serves_on_with_one() -> None:
    engine = fake_engine(step_s=0.01, data_parallel_size=2, max_engine_restarts=0)
    FAKE_ENGINE_COUNT.append("the second of two")
    server = await trio.to_thread.run_sync(start_fake_server, "the first of two", engine)
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    try:
        assert len(server.engine_pids) == 2
        async with server.client() as client:
            for rank, times in ((0, 1), (1, 2)):
                for _ in range(times):
                    answer = await client.post(
                        "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}
                    )
                    assert answer.status_code == 200, answer.text
            assert requests_by_engine((await client.get("/metrics")).text) == {"0": 1, "1": 2}
            refused = await client.post("/v1/completions", json={**body, "data_parallel_rank": 2})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")

            asked = {**body, "max_tokens": 100, "seed": 1}
            expected = (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
            texts = ["", ""]

            async def read(rank: int) -> None:
                async with open_stream(client, "/v1/completions", {**asked, "data_parallel_rank": rank}) as stream:
                    async for event in stream.events():
                        texts[rank] += event["choices"][0]["text"]

            async with trio.open_nursery() as nursery:
                for rank in range(2):
                    nursery.start_soon(read, rank)
                await wait_until(lambda: all(texts))
                os.kill(server.engine_pids[0], signal.SIGKILL)

            assert texts == [expected] * 2
            for path in ("/health", "/readyz", "/livez"):
                assert (await client.get(path)).status_code == 200
            await wait_until(lambda: len(server.engine_pids) == 1)
            answers = [
                await client.post("/v1/completions", json={**body, "data_parallel_rank": rank}) for rank in range(2)
            ]
            assert sorted(answer.status_code for answer in answers) == [200, 503]
    finally:
        await trio.to_thread.run_sync(server.stop)
    assert server.process.returncode == 0
