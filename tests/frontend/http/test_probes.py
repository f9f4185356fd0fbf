"""/health, /version, /metrics, /v1/models, /openapi.json, and paths that are not there."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from tests.support.exchange import Exchange
from tests.support.fake_client import FakeClient
from tests.support.http_server import Reply, open_server
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError
from trio_llm.frontend.control.status import EngineState, EngineStatus
from trio_llm.frontend.http.app import create_app
from trio_llm.frontend.http.model_names import model_names
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.version import __version__


async def get(client: FakeClient, path: str) -> Reply:
    async with open_server(client) as server:
        return await server.call("GET", path)


# -------------------------------------------------------------------------------------------- health


async def test_a_ready_engine_that_answers_is_healthy() -> None:
    reply = await get(FakeClient(), "/health")

    assert (reply.status, reply.json) == (200, {"status": "ready"})


async def test_while_loading_health_says_how_far_it_is() -> None:
    client = FakeClient()
    client.state = EngineStatus(state="loading", phase="load", done=3, total=10, elapsed_s=1.23456)
    reply = await get(client, "/health")

    assert reply.status == 503
    assert reply.json == {
        "status": "loading",
        "phase": "load",
        "done": 3,
        "total": 10,
        "elapsed_s": 1.235,
        "reason": None,
    }
    assert int(reply.headers["retry-after"]) > 0


async def test_a_dead_engine_is_unhealthy_and_the_reply_has_the_reason() -> None:
    client = FakeClient()
    client.state = EngineStatus(state="dead", reason="CUDA error")
    reply = await get(client, "/health")

    assert (reply.status, reply.json["status"], reply.json["reason"]) == (503, "dead", "CUDA error")


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineDeadError("gone"), "dead"), (EngineUnavailableError("not yet"), "loading")],
)
async def test_an_engine_that_fails_the_round_trip_is_unhealthy(error: Exception, status: str) -> None:
    client = FakeClient()
    client.health = error
    reply = await get(client, "/health")

    assert (reply.status, reply.json["status"], reply.json["reason"]) == (503, status, str(error))


@pytest.mark.parametrize(
    ("state", "ready", "live", "started"),
    [
        ("loading", 503, 200, 503),
        ("ready", 200, 200, 200),
        ("recovering", 503, 200, 200),
        ("stalled", 503, 200, 200),
        ("asleep", 503, 200, 200),
        ("draining", 503, 200, 200),
        ("dead", 503, 503, 503),
    ],
)
async def test_each_probe_asks_its_own_question(state: EngineState, ready: int, live: int, started: int) -> None:
    client = FakeClient()
    client.state = EngineStatus(state=state, reason="because")

    replies = [await get(client, path) for path in ("/health", "/readyz", "/livez", "/startupz")]

    assert [reply.status for reply in replies] == [ready, ready, live, started]
    assert all(reply.json["reason"] == "because" for reply in replies if reply.status == 503)


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_an_engine_that_does_not_answer_is_stalled_within_two_seconds(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    client = FakeClient()
    client.health = trio.Event()
    exchange = Exchange(create_app(client, ServerConfig()), method="GET", path=path)
    begin_s = trio.current_time()
    await exchange.run()

    assert exchange.status == 503
    assert b'"status":"stalled"' in exchange.body
    assert trio.current_time() - begin_s < 2


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_a_busy_engine_that_makes_progress_late_is_healthy(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    client = FakeClient()
    client.health = progress = trio.Event()
    exchange = Exchange(create_app(client, ServerConfig()), method="GET", path=path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(1.4)
        assert exchange.sent == []
        progress.set()

    assert (exchange.status, exchange.body) == (200, b'{"status":"ready"}')


async def test_an_engine_that_dies_while_it_is_asked_is_not_called_stalled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    client = FakeClient()
    client.health = trio.Event()
    exchange = Exchange(create_app(client, ServerConfig()), method="GET", path="/health")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        client.state = EngineStatus(state="recovering", reason="because")

    assert exchange.status == 503
    assert b'"status":"recovering"' in exchange.body
    assert b'"reason":"because"' in exchange.body


# -------------------------------------------------------------------------------- while not ready


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
async def test_work_is_refused_with_a_503_unless_the_engine_is_ready(state: EngineState) -> None:
    client = FakeClient()
    client.state = EngineStatus(state=state)
    async with open_server(client) as server:
        replies = [await server.chat(), await server.complete(), await server.chat(stream=True)]

    assert [reply.status for reply in replies] == [503] * 3
    for reply in replies:
        assert int(reply.headers["retry-after"]) > 0
        assert reply.error["type"] == "server_error"


async def test_while_loading_there_are_no_models_yet() -> None:
    client = FakeClient()
    client.state = EngineStatus(state="loading")
    reply = await get(client, "/v1/models")

    assert (reply.status, reply.headers["retry-after"]) == (503, "3")


async def test_version_and_metrics_answer_while_loading() -> None:
    client = FakeClient()
    client.state = EngineStatus(state="loading")
    async with open_server(client, metrics=PrometheusStatLogger("tiny")) as server:
        version = await server.call("GET", "/version")
        metrics = [await server.call("GET", path) for path in ("/metrics", "/metrics/")]

    assert (version.status, version.json) == (200, {"version": __version__})
    assert [reply.status for reply in metrics] == [200, 200]


# -------------------------------------------------------------------------------------------- metrics


async def test_metrics_can_be_parsed_and_hold_what_was_recorded() -> None:
    metrics = PrometheusStatLogger("tiny")
    metrics.record(None, IterationStats(num_generation_tokens=5))
    async with open_server(FakeClient(), metrics=metrics) as server:
        plain = await server.call("GET", "/metrics")
        wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
        open_metrics = await server.call("GET", "/metrics", headers=wanted)

    families = {family.name: family for family in text_string_to_metric_families(plain.body.decode())}
    assert families["vllm:generation_tokens"].samples[0].value == 5
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")


async def test_without_statistics_there_is_no_metrics_path() -> None:
    assert (await get(FakeClient(), "/metrics")).status == 404


# --------------------------------------------------------------------------------------------- models


async def test_every_served_name_is_a_model() -> None:
    async with open_server(FakeClient(), served_model_names=("one", "org/two")) as server:
        listed = await server.call("GET", "/v1/models")
        two = await server.call("GET", "/v1/models/org/two")
        three = await server.call("GET", "/v1/models/three")

    assert [card["id"] for card in listed.json["data"]] == ["one", "org/two"]
    assert listed.json["object"] == "list"
    card = two.json
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "org/two",
        "object": "model",
        "owned_by": "trio_llm",
        "root": "org/two",
        "parent": None,
        "max_model_len": 4096,
        "permission": [],
    }
    assert (three.status, three.error["param"]) == (404, "model")


def test_a_model_without_given_names_has_that_of_its_directory(tmp_path: object) -> None:
    assert model_names(EngineConfig(), ServerConfig()) == ("SmolLM2-135M-Instruct",)
    assert model_names(EngineConfig(model=str(tmp_path)), ServerConfig())[0] in str(tmp_path)
    assert model_names(EngineConfig(model=f"{tmp_path}/"), ServerConfig(served_model_names=("a",))) == ("a",)


# ---------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/models/", "/v1/chat/completions/", "/docs", "/%ff%00", "//"])
async def test_a_path_that_is_not_there_is_a_404_in_the_shape_of_errors(path: str) -> None:
    reply = await get(FakeClient(), path)

    assert (reply.status, reply.error["type"], reply.error["param"]) == (404, "not_found_error", None)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_a_405_that_lists_the_right_ones(method: str, path: str, allow: str) -> None:
    async with open_server(FakeClient()) as server:
        reply = await server.call(method, path)

    assert (reply.status, reply.error["type"]) == (405, "invalid_request_error")
    assert reply.headers["allow"] == allow


async def test_the_openapi_document_describes_every_path_and_resolves() -> None:
    reply = await get(FakeClient(), "/openapi.json")

    document = reply.json
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/pooling",
        "/score",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/readyz",
        "/livez",
        "/startupz",
        "/version",
        "/metrics",
    }
    references = [part.split('"')[0] for part in reply.body.decode().split('"$ref":"#/components/schemas/')[1:]]
    assert set(references) <= set(document["components"]["schemas"])
    assert {"ChatRequest", "CompletionRequest", "EmbeddingRequest", "PoolingRequest", "ScoreRequest", "Error"} <= set(
        references
    )
