"""What /metrics says about HTTP requests, and what answers say about their times."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_client import HANG, End, FakeClient
from tests.support.http_server import BOUND_S, CHAT, open_server
from trio_llm.config import ServerConfig
from trio_llm.frontend.http.server.instrument import HttpExchange
from trio_llm.frontend.http.server.shell import Shell
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.testing.fake_llm import open_fake_llm
from trio_llm.testing.server import open_test_server


def counts(metrics: PrometheusStatLogger, name: str = "http_requests_total") -> dict[str, float]:
    """By the values of all labels."""
    return {
        " ".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name == name
    }


async def test_requests_count_by_route_method_and_class_of_status() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_server(FakeClient("a", "b", End()), metrics=metrics, served_model_names=("org/x",)) as server:
        await server.chat()
        await server.chat(stream=True)
        await server.chat(temperature=99)
        await server.call("GET", "/v1/models/org/x")
        await server.call("GET", "/v1/models/none")
        await server.call("GET", "/v1/chat/completions")
        await server.call("GET", "/no/such/path")
        await server.call("POST", "/another")
        await server.call("BREW", "/v1/models")

    assert counts(metrics) == {
        "/v1/chat/completions POST 2xx": 2,
        "/v1/chat/completions POST 4xx": 1,
        "/v1/chat/completions GET 4xx": 1,
        "/v1/models/{name} GET 2xx": 1,
        "/v1/models/{name} GET 4xx": 1,
        "none GET 4xx": 1,
        "none POST 4xx": 1,
        "/v1/models other 4xx": 1,
    }
    assert sum(counts(metrics, "http_request_duration_seconds_count").values()) == 9
    assert counts(metrics, "http_request_duration_highr_seconds_count") == {"": 9}


async def test_probes_do_not_count() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_server(FakeClient(), metrics=metrics) as server:
        for path in ("/health", "/readyz", "/livez", "/startupz", "/version", "/metrics", "/metrics/"):
            await server.call("GET", path)
        await server.call("POST", "/health")

    assert counts(metrics) == {}


async def test_sizes_are_those_of_bodies_and_streams_have_none() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_server(FakeClient("a", End()), metrics=metrics) as server:
        whole = await server.chat()
        await server.chat(stream=True)

    assert counts(metrics, "http_response_size_bytes_count") == {"/v1/chat/completions": 1}
    assert counts(metrics, "http_response_size_bytes_sum") == {"/v1/chat/completions": len(whole.body)}
    assert counts(metrics, "http_request_size_bytes_count") == {"/v1/chat/completions": 2}
    assert counts(metrics, "http_request_size_bytes_sum")["/v1/chat/completions"] > 2 * len(str(CHAT)) - 10


class Noting(PrometheusStatLogger):
    """Says when a request was counted."""

    def __init__(self) -> None:
        super().__init__("m")
        self.counted = trio.Event()

    def record_http(self, **fields: Any) -> None:
        super().record_http(**fields)
        self.counted.set()


@pytest.mark.parametrize(("stream", "status"), [(False, "4xx"), (True, "2xx")])
async def test_a_client_that_leaves_counts_by_what_it_has_got(stream: bool, status: str) -> None:
    metrics = Noting()
    client = FakeClient("a", HANG)
    async with open_server(client, metrics=metrics) as server:
        async with server.connect() as connection:
            await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
            with trio.fail_after(BOUND_S):
                await client.entered.wait()
                if stream:
                    await connection.next_event()
        with trio.fail_after(BOUND_S):
            await metrics.counted.wait()

    assert counts(metrics) == {f"/v1/chat/completions POST {status}": 1}


async def test_a_body_that_is_too_large_counts_with_its_route() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_server(FakeClient(), metrics=metrics, max_body_bytes=100) as server:
        reply = await server.chat(messages=[{"role": "user", "content": "x" * 1000}])

    assert reply.status == 413
    assert counts(metrics) == {"/v1/chat/completions POST 4xx": 1}


async def test_an_exchange_is_observed_once_whatever_number_of_pieces_it_has() -> None:
    observed: list[HttpExchange] = []
    num_sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1

    received = False

    async def receive_once() -> dict[str, Any]:
        nonlocal received
        if received:
            await trio.sleep_forever()
        received = True
        return {"type": "http.request", "body": b"12345", "more_body": False}

    shell = Shell(app, ServerConfig(), is_draining=lambda: False, observe=observed.append)
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/p", "headers": []}
    await shell(scope, receive_once, send)

    assert num_sent == 52
    [exchange] = observed
    assert (exchange.path, exchange.method, exchange.status) == ("/p", "POST", 201)
    assert (exchange.request_bytes, exchange.response_bytes) == (5, None)


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False), ("br", False)],
)
async def test_metrics_are_packed_for_those_who_ask_for_it(accepted: str, is_packed: bool) -> None:
    metrics = PrometheusStatLogger("m")
    async with open_server(FakeClient(), metrics=metrics) as server:
        plain = await server.call("GET", "/metrics")
        reply = await server.call("GET", "/metrics", headers={"accept-encoding": accepted})

    assert ("content-encoding" in reply.headers) == is_packed
    body = gzip.decompress(reply.body) if is_packed else reply.body
    assert b"vllm:generation_tokens_total" in body
    if is_packed:
        assert len(reply.body) < len(plain.body) / 5


# ------------------------------------------------------------------------------ metrics in answers


FIELDS = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]
LONG = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}


async def post(body: dict[str, Any], *, path: str = "/v1/chat/completions", **settings: Any) -> httpx.Response:
    settings = {"enable_per_request_metrics": True, **settings}
    async with (
        open_fake_llm(step_s=0.002) as llm,
        open_test_server(llm, **settings) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        return await client.post(path, json={**LONG, **body})


def check(found: dict[str, Any]) -> None:
    assert list(found) == FIELDS
    assert found["time_to_first_token_ms"] > 0
    assert found["queue_time_ms"] >= 0
    assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 8, rel=0.01)
    assert found["tokens_per_second"] == pytest.approx(9000 / found["generation_time_ms"], rel=0.01)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Once"})])
async def test_whole_answers_tell_how_long_they_took(path: str, body: dict[str, Any]) -> None:
    check((await post(body, path=path)).json()["metrics"])


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Once"})])
async def test_the_last_chunk_of_a_stream_tells_it(path: str, body: dict[str, Any], with_usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": with_usage}}

    *others, last = chunks(await post({**body, **options}, path=path))

    check(last["metrics"])
    assert ("usage" in last) == with_usage
    assert not any("metrics" in chunk for chunk in others)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/completions", {"prompt": ["Once", "Twice"]}),
        ("/v1/completions", {"prompt": "Once", "n": 2, "temperature": 1}),
    ],
)
async def test_answers_with_several_choices_do_not_tell(path: str, body: dict[str, Any]) -> None:
    assert (await post(body, path=path)).json().get("metrics") is None
    streamed = chunks(await post({**body, "stream": True}, path=path))
    assert not any("metrics" in chunk for chunk in streamed)


async def test_without_the_option_answers_do_not_tell() -> None:
    whole = await post(CHAT, enable_per_request_metrics=False)
    completion = await post({"prompt": "Once"}, path="/v1/completions", enable_per_request_metrics=False)

    assert whole.json()["metrics"] is None
    assert "metrics" not in completion.json()
