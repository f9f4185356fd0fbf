"""The table of routes and the prologue that all requests to the model share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.exchange import Exchange
from tests.support.fake_client import FakeClient
from tests.support.http_server import BODIES, open_server
from trio_llm.config import ServerConfig
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.app import App
from trio_llm.frontend.http.openai import fields
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute, ModelRoute, ProbeRoute
from trio_llm.frontend.http.routes import create_routes
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.sampling import SamplingParams


class CountingClient(FakeClient):
    """Counts how often it is asked whether it takes requests."""

    def __init__(self) -> None:
        super().__init__()
        self.num_admission_checks = 0

    def check_admission(self) -> None:
        self.num_admission_checks += 1
        super().check_admission()


def test_each_path_and_method_stands_in_the_table_once() -> None:
    places = [(route.method, route.path) for route in ROUTES]

    assert len(set(places)) == len(places)
    assert {route.path for route in ROUTES if isinstance(route, ModelRoute)} == set(BODIES)


def test_the_probes_of_the_table_are_those_that_the_app_answers() -> None:
    app = App(FakeClient(), ServerConfig(), PrometheusStatLogger("m"))

    assert {route.path for route in ROUTES if isinstance(route, ProbeRoute)} == set(app._probes) - {"/metrics/"}


@pytest.mark.parametrize("path", BODIES)
async def test_admission_is_asked_once_before_the_body_is_read_and_no_more_than_once_after(path: str) -> None:
    client = CountingClient()
    headers = [(b"content-type", b"application/json")]
    for body, most in ((b"nonsense", 1), (json.dumps(BODIES[path]).encode(), 2)):
        exchange = Exchange(
            create_routes(client, ServerConfig(), RunningRequests()),
            body=body,
            method="POST",
            path=path,
            headers=headers,
            query_string=b"",
        )
        client.num_admission_checks = 0
        await exchange.run()

        num_requests = 3 if path == "/score" and most == 2 else 1
        assert client.num_admission_checks == 1 + (most - 1) * num_requests  # the client itself asks for each request


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_parameters_are_made_and_checked_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SamplingParams] = []

    def make(**given: Any) -> SamplingParams:
        made.append(SamplingParams(**given))
        return made[-1]

    monkeypatch.setattr(fields, "SamplingParams", make)
    client = FakeClient()
    async with open_server(client) as server:
        reply = await server.call("POST", path, {**BODIES[path], "temperature": 0.5})

    assert reply.status == 200
    assert [id(params) for params in made] == [id(asked.params) for asked in client.asked]


@pytest.mark.parametrize("path", BODIES)
async def test_what_cannot_be_admitted_is_refused_before_the_body_is_looked_at(path: str) -> None:
    client = FakeClient()
    client.drain()
    async with open_server(client) as server:
        reply = await server.call("POST", path, b"nonsense", {"content-type": "application/json"})

    assert reply.status == 503


async def test_the_document_leaves_the_paths_of_control_out() -> None:
    async with open_server(FakeClient(), dev_mode=True) as server:
        document = (await server.call("GET", "/openapi.json")).json

    controls = {route.path for route in ROUTES if isinstance(route, ControlRoute)}
    assert len(controls) == 14
    assert controls.isdisjoint(document["paths"])
