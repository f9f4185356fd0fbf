"""The whole path with the embedded model: HTTP, front end, wire, engine process, torch, and back."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.end_to_end.servers import ENGINE_COUNT, Server, is_alive, kill, open_stream, wait_until
from trio_llm.config import EngineConfig
from trio_llm.engine.models.locate import locate_model

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small fox who",
    "A list of prime numbers: 2, 3, 5,",
    "To bake bread you need",
    "The opposite of hot is",
    "def fibonacci(n):\n",
    "Water boils at",
    "My favourite season is autumn, because the leaves turn red and yellow, the air is crisp, and in the evening we",
]


def greedy(number: int) -> dict[str, Any]:
    """A greedy request; its length depends on the number."""
    return {
        "prompt": f"{PROMPTS[number % len(PROMPTS)]}",
        "max_tokens": 6 + number % 11,
        "temperature": 0,
        "logprobs": 1 if number % 4 == 0 else None,
        "ignore_eos": number % 2 == 0,
    }


def sampled(number: int) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 6 + number % 7,
        "temperature": 0.5 + (number % 3) / 2,
        "top_p": 0.9 if number % 2 else 1.0,
        "top_k": 40 if number % 3 else 0,
        "seed": number,
        "stop": ["\n\n"] if number % 2 else None,
        "min_tokens": number % 3,
    }


def request_of(number: int) -> dict[str, Any]:
    """Requests of different lengths with mixed parameters."""
    return sampled(number) if number % 3 == 2 else greedy(number)


async def stream_text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text, ends = "", []
    async with open_stream(client, "/v1/completions", body) as stream:
        async for event in stream.events():
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["text"]
                ends.append(choice["finish_reason"])
    assert next(end for end in ends if end is not None) in ("stop", "length")
    assert ends.count(None) == len(ends) - 1
    return text


async def whole_text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    return str(choice["text"])


async def run_load(client: httpx.AsyncClient) -> dict[int, str]:
    """32 streams and 8 whole answers at once."""
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        body = request_of(number)
        texts[number] = await (stream_text if number < 32 else whole_text)(client, body)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(run, number)
    return texts


async def test_it_knows_the_capital_of_france_streamed_and_whole(float32_server: Server) -> None:
    async with float32_server.client() as client:
        body = {"messages": FRANCE, "temperature": 0, "max_tokens": 20}
        pieces = []
        async with open_stream(client, "/v1/chat/completions", body) as stream:
            async for event in stream.events():
                pieces.append(event["choices"][0]["delta"].get("content", ""))
        whole = (await client.post("/v1/chat/completions", json=body)).json()

    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 3, "the answer must come in pieces"
    assert whole["choices"][0]["message"]["content"] == "".join(pieces)


async def test_forty_mixed_requests_at_once_give_what_each_gives_alone(float32_server: Server) -> None:
    async with float32_server.client() as client:
        together = await run_load(client)
        alone = {number: await whole_text(client, request_of(number)) for number in range(40)}

        assert together == alone
        await wait_until(functools.partial(float32_server.is_idle, client))


def oracle_texts() -> dict[int, str]:
    """The greedy answers as transformers' own `generate` gives them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = locate_model(EngineConfig(), lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    texts = {}
    for number in range(12):
        body = greedy(number)
        inputs = tokenizer(body["prompt"], return_tensors="pt")
        output = model.generate(
            inputs.input_ids,
            # Always given: on this model pad equals eos, and a mask made up by transformers would hide the latter.
            attention_mask=torch.ones_like(inputs.input_ids),
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            **({"eos_token_id": None} if body["ignore_eos"] else {}),
        )
        texts[number] = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return texts


async def test_greedy_answers_are_those_of_transformers(float32_server: Server) -> None:
    expected = oracle_texts()
    async with float32_server.client() as client:
        texts = {number: await whole_text(client, greedy(number)) for number in expected}

    assert texts == expected


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_killed_mid_answer_frees_everything(float32_server: Server, streamed: bool) -> None:
    body = {"prompt": "Count: 1 2 3", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": streamed}
    async with float32_server.client() as client:
        running = "vllm:num_requests_running"
        # A process of its own, so that it can be killed as clients are.
        curl = await trio.lowlevel.open_process(
            [
                "curl",
                "-sN",
                f"{float32_server.url}/v1/completions",
                "--json",
                httpx.Request("POST", "http://x", json=body).content.decode(),
            ],
            stdout=-1,
        )
        try:
            if streamed:
                assert curl.stdout is not None
                assert await curl.stdout.receive_some(10)
            await wait_until(lambda: is_running(client, float32_server, running))
            curl.kill()
            await wait_until(functools.partial(float32_server.is_idle, client), within_s=2)
        finally:
            curl.kill()
            await curl.wait()


async def is_running(client: httpx.AsyncClient, server: Server, name: str) -> bool:
    return await server.metric(client, name) == 1 and await server.metric(client, "vllm:kv_cache_usage_perc") > 0


def test_the_front_end_has_no_torch(float32_server: Server) -> None:
    maps = Path(f"/proc/{float32_server.process.pid}/maps").read_text()

    assert "libzmq" in maps
    assert "torch" not in maps


async def test_bfloat16_completes_the_same_load_and_an_engine_that_is_killed_takes_nobody_by_surprise(
    fragile_server: Server,
) -> None:
    async with fragile_server.client() as client:
        assert len(await run_load(client)) == 40

        engine_pid = fragile_server.engine_pid
        ends: list[dict[str, Any]] = []

        async def run(started: trio.Event) -> None:
            body = {"messages": FRANCE, "max_tokens": 4000, "ignore_eos": True}
            async with open_stream(client, "/v1/chat/completions", body) as stream:
                events = []
                async for event in stream.events():
                    events.append(event)
                    if len(events) == 3:
                        started.set()
                ends.append(events[-1])

        async with trio.open_nursery() as nursery:
            started = [trio.Event() for _ in range(4)]
            for event in started:
                nursery.start_soon(run, event)
            for event in started:
                await event.wait()
            kill(engine_pid)

        assert [end["error"]["code"] for end in ends] == [503] * 4
        assert all("SIGKILL" in end["error"]["message"] for end in ends)
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert "SIGKILL" in health.json()["reason"]
        refused = await client.post("/v1/chat/completions", json={"messages": FRANCE})
        assert refused.status_code == 503
        assert not is_alive(engine_pid)

    assert await trio.to_thread.run_sync(fragile_server.wait_exit) == 1
    (reason,) = [line for line in fragile_server.output.splitlines() if line.startswith("trio-llm: ")]
    assert "SIGKILL" in reason
    assert "Traceback" not in fragile_server.output


async def test_an_idle_server_still_has_its_engine_after_fifteen_seconds(float32_server: Server) -> None:
    # Trio ends worker threads after ten idle seconds: an engine spawned in one would die with it.
    await wait_until(lambda: time.monotonic() - float32_server.started_s > 16)

    assert is_alive(float32_server.engine_pid)
    async with float32_server.client() as client:
        assert (await client.get("/health")).status_code == 200


async def test_an_engine_that_is_killed_under_load_changes_no_answer(float32_server: Server) -> None:
    """The last one: the server has another engine afterwards."""
    async with float32_server.client() as client:
        undisturbed = await run_load(client)
        tokens = "vllm:generation_tokens_total"
        first_pid, before = float32_server.engine_pid, await float32_server.metric(client, tokens)

        async def disturb() -> None:
            ENGINE_COUNT.append("the embedded model in float32 goes on after a death")
            await wait_until(functools.partial(is_above, client, float32_server, tokens, before + 100))
            kill(first_pid)

        texts: dict[int, str] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            texts = await run_load(client)

        assert texts == undisturbed
        assert float32_server.engine_pid != first_pid
        assert "goes on with" in float32_server.output
        await wait_until(functools.partial(float32_server.is_idle, client))


async def is_above(client: httpx.AsyncClient, server: Server, name: str, value: float) -> bool:
    return await server.metric(client, name) >= value
