"""The control routes: there only in dev mode, and what each does to the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.fake_client import FakeClient
from tests.support.http_server import BOUND_S, Server, open_server
from tests.support.weight_files import write_weights
from trio_llm.config import ServerConfig
from trio_llm.errors import ConfigError
from trio_llm.frontend.http.control_routes import MAX_ARGS
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute
from trio_llm.testing import FakeLLM, open_fake_llm

CONTROL = [(route.method, route.path) for route in ROUTES if isinstance(route, ControlRoute)]


@asynccontextmanager
async def open_dev_server(**settings: Any) -> AsyncIterator[tuple[FakeLLM, Server]]:
    async with (
        open_fake_llm(answer="Hello, world.") as llm,
        open_server(cast(FakeClient, llm), dev_mode=True, **settings) as server,
    ):
        with trio.fail_after(BOUND_S):
            yield llm, server


async def works(server: Server) -> bool:
    reply = await server.complete(max_tokens=20)
    return reply.status == 200 and reply.json["choices"][0]["text"] == "Hello, world."


def test_every_route_is_among_those_that_are_tried() -> None:
    assert len(CONTROL) == 14


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_without_dev_mode_there_is_no_such_path(method: str, path: str) -> None:
    async with open_server(FakeClient()) as server:
        assert (await server.call(method, path)).status == 404


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_a_client_without_control_is_501_or_its_body_is_400_and_other_methods_are_405(
    method: str, path: str
) -> None:
    async with open_server(FakeClient(), dev_mode=True) as server:
        reply = await server.call(method, path)
        other = await server.call("GET" if method == "POST" else "POST", path)

    assert reply.status == (400 if path in ("/collective_rpc", "/update_weights", "/finish_weight_update") else 501)
    assert other.status == 405


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_a_web_page_in_a_browser_can_control_nothing(method: str, path: str) -> None:
    async with open_dev_server() as (llm, server):
        reply = await server.call(method, path, headers={"Origin": "http://a-page.example"})

        assert (reply.status, reply.error["type"]) == (403, "permission_error")
        assert not await llm.is_sleeping()
        assert not await llm.is_paused()
        assert await works(server)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin"])
@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_neither_can_a_page_whose_browser_sends_no_origin(method: str, path: str, site: str) -> None:
    async with open_dev_server() as (llm, server):
        reply = await server.call(method, path, headers={"Sec-Fetch-Site": site})

        assert (reply.status, reply.error["type"]) == (403, "permission_error")
        assert "Sec-Fetch-Site" in reply.error["message"]
        assert not await llm.is_sleeping()
        assert not await llm.is_paused()


async def test_the_operators_own_browser_may_ask() -> None:
    async with open_dev_server() as (_, server):
        assert (await server.call("GET", "/is_paused", headers={"Sec-Fetch-Site": "none"})).status == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/sleep?level=1&level=2", "level"),
        ("/sleep?level=1&level=1", "level"),
        ("/pause?mode=keep&mode=abort", "mode"),
        ("/pause?mode=keep&clear_cache=true&clear_cache=false", "clear_cache"),
    ],
)
async def test_a_parameter_that_is_given_twice_is_a_400_that_names_it(query: str, param: str) -> None:
    async with open_dev_server() as (llm, server):
        reply = await server.call("POST", query)

        assert (reply.status, reply.error["param"]) == (400, param)
        assert f"{param} is 2 times" in reply.error["message"]
        assert not await llm.is_sleeping()
        assert not await llm.is_paused()


def test_dev_mode_is_for_loopback_alone() -> None:
    with pytest.raises(ConfigError, match="--dev-mode"):
        ServerConfig(host="0.0.0.0", allow_unauthenticated=True, dev_mode=True)


@pytest.mark.parametrize("query", ["", "?level=1", "?level=2"])
async def test_sleep_refuses_requests_until_all_is_awake(query: str) -> None:
    async with open_dev_server() as (_, server):
        assert (await server.call("GET", "/is_sleeping")).json == {"is_sleeping": False}
        assert (await server.call("POST", f"/sleep{query}")).status == 200
        assert (await server.call("GET", "/is_sleeping")).json == {"is_sleeping": True}

        refused = await server.complete()
        assert refused.status == 503
        assert "retry-after" in refused.headers
        assert "wake it up" in refused.error["message"]
        health = await server.call("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "asleep")

        assert (await server.call("POST", "/wake_up?tags=weights")).status == 200
        assert (await server.complete()).status == 503
        assert (await server.call("POST", "/wake_up?tags=weights&tags=kv_cache")).status == 200
        assert (await server.call("GET", "/is_sleeping")).json == {"is_sleeping": False}
        assert await works(server)


@pytest.mark.parametrize("query", ["", "?mode=abort", "?mode=wait", "?mode=keep&clear_cache=false"])
async def test_a_pause_holds_requests_until_the_resume(query: str) -> None:
    async with open_dev_server() as (llm, server):
        assert (await server.call("POST", f"/pause{query}")).status == 200
        assert (await server.call("GET", "/is_paused")).json == {"is_paused": True}
        done: list[bool] = []

        async def ask() -> None:
            done.append(await works(server))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not llm.num_waiting:
                await wait_all_tasks_blocked()
            assert not done
            assert (await server.call("POST", "/resume")).status == 200
        assert done == [True]
        assert (await server.call("GET", "/is_paused")).json == {"is_paused": False}


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?level=1.0", "level"),
        ("/wake_up?tags=x", "tags"),
        ("/pause?mode=stop", "mode"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/sleep?levl=2", "level"),
        ("/wake_up?tag=weights", "tags"),
        ("/pause?mod=keep", "mode"),
    ],
)
async def test_a_wrong_query_is_400_and_changes_nothing(path: str, param: str) -> None:
    async with open_dev_server() as (_, server):
        reply = await server.call("POST", path)

        assert reply.status == 400
        assert param in reply.error["message"]
        assert await works(server)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/start_profile"])
async def test_a_body_where_the_query_counts_is_400_and_changes_nothing(path: str) -> None:
    async with open_dev_server() as (_, server):
        reply = await server.call("POST", path, {"level": 2, "mode": "keep"})

        assert reply.status == 400
        assert "query" in reply.error["message"]
        assert await works(server)


@pytest.mark.parametrize("path", ["/is_sleeping?level=1", "/is_paused?mode=keep"])
async def test_a_wrong_query_of_a_question_is_400_too(path: str) -> None:
    async with open_dev_server() as (_, server):
        assert (await server.call("GET", path)).status == 400


async def test_a_remote_call_answers_for_each_worker() -> None:
    async with open_dev_server() as (_, server):
        reply = await server.call("POST", "/collective_rpc", {"method": "model_info", "args": [], "timeout": 5})
        unknown = await server.call("POST", "/collective_rpc", {"method": "shutdown"})
        nested = await server.call("POST", "/collective_rpc", {"method": "ping", "args": ["deep"]})
        long = await server.call("POST", "/collective_rpc", {"method": "ping", "args": None, "timeout": 86400})

    assert [one["weight_version"] for one in reply.json["results"]] == ["default"]
    assert (unknown.status, nested.status, long.status) == (400, 400, 200)
    assert "memory_info" in unknown.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"method": 1},
        {"method": "ping", "args": "x"},
        {"method": "ping", "args": [[]]},
        {"method": "ping", "args": [{}]},
        {"method": "ping", "args": [0] * (MAX_ARGS + 1)},
        {"method": "ping", "timeout": "5"},
        {"method": "ping", "timeout": 0},
        {"method": "ping", "timeout": True},
        {"method": "ping", "timeout": 86401},
        {"method": "ping", "timeout": 10**400},
        {"method": "ping", "args": [2**70]},
        {"method": "ping", "args": False},
        {"method": "ping", "args": 0},
        {"method": "ping", "args": ""},
        {"method": "ping", "args": {}},
        {"method": "ping", "kwargs": []},
        {"method": "ping", "kwargs": {"a": 1}},
        {"method": "ping", "kwargs": {"a": []}},
        {"method": "ping", "kwargs": {str(number): 0 for number in range(MAX_ARGS + 1)}},
        {"method": "weights_checksum", "args": [1]},
        {"method": "weights_checksum", "args": [""], "kwargs": {"prefix": ""}},
        {"method": "ping", "keywords": {}},
    ],
)
async def test_a_remote_call_that_is_no_plain_data_is_400(body: dict[str, Any]) -> None:
    async with open_dev_server() as (_, server):
        assert (await server.call("POST", "/collective_rpc", body)).status == 400


async def test_weights_come_from_below_the_root_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "new").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "new")
    (root / "loop").symlink_to("loop")
    async with open_dev_server(weights_root=str(root)) as (llm, server):
        for path in ("..", "../outside", str(outside), "link", "/", "new/../../outside", "a\0b", "loop", "loop/new"):
            reply = await server.call("POST", "/update_weights", {"path": path, "version": "v"})
            assert (reply.status, reply.error["param"]) == (400, "path"), path
        for path in ("missing", str(root / "missing"), "x" * 300, "x/" * 3000):
            assert (await server.call("POST", "/update_weights", {"path": path, "version": "v"})).status == 400
        (info,) = await llm.collective_rpc("model_info")
        assert info["weight_version"] == "default"

        for path in ("new", str(root / "new"), "inner"):
            assert (await server.call("POST", "/update_weights", {"path": path, "version": path})).status == 200
            (info,) = await llm.collective_rpc("model_info")
            assert info["weight_version"] == path
        assert await works(server)


async def test_without_a_root_there_are_no_new_weights(tmp_path: Path) -> None:
    async with open_dev_server() as (_, server):
        reply = await server.call("POST", "/update_weights", {"path": str(tmp_path), "version": "v"})

    assert reply.status == 501
    assert "--weights-root" in reply.error["message"]


async def test_profiles_need_the_operators_folder() -> None:
    async with open_dev_server() as (_, server):
        reply = await server.call("POST", "/start_profile")

    assert reply.status == 501
    assert "--profile-dir" in reply.error["message"]


async def test_forgetting_the_cache_and_leaving_a_call_harm_no_request() -> None:
    async with open_dev_server() as (llm, server):
        assert (await server.call("POST", "/reset_prefix_cache")).status == 200
        llm.stall()
        async with server.connect() as connection:
            await connection.request("POST", "/sleep")
            while not llm._control._jobs:
                await wait_all_tasks_blocked()
        llm.resume()
        while llm._control._jobs:
            await wait_all_tasks_blocked()

        # The client has left; what had begun was carried out, and is known.
        assert (await server.complete()).status == 503
        assert (await server.call("POST", "/wake_up")).status == 200
        assert await works(server)


async def test_every_route_twenty_times_at_once(tmp_path: Path) -> None:
    bodies = {"/collective_rpc": {"method": "ping"}, "/update_weights": {"path": ".", "version": "v"}}
    async with open_dev_server(weights_root=str(tmp_path)) as (llm, server):
        statuses: list[int] = []

        async def call(method: str, path: str) -> None:
            body = json.dumps(bodies[path]).encode() if path in bodies else b""
            reply = await server.call(method, path, body, {"content-type": "application/json"})
            statuses.append(reply.status)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                for method, path in CONTROL:
                    nursery.start_soon(call, method, path)

        assert len(statuses) == 20 * len(CONTROL)
        assert set(statuses) <= {200, 400, 501}
        await llm.wake_up()
        await llm.resume_generation()
        assert await works(server)


async def test_a_remote_call_passes_arguments_by_place_and_by_name() -> None:
    ways: list[dict[str, Any]] = [{}, {"args": ["wei"]}, {"kwargs": {"prefix": "wei"}}, {"args": [], "kwargs": {}}]
    async with open_dev_server() as (_, server):
        replies = [
            await server.call("POST", "/collective_rpc", {"method": "weights_checksum", **fields}) for fields in ways
        ]
        unknown = await server.call(
            "POST", "/collective_rpc", {"method": "weights_checksum", "kwargs": {"prefix": "b"}}
        )

    assert [reply.json for reply in replies] == [{"results": ["00000000"]}] * 4
    assert (unknown.status, unknown.error["param"]) == (400, "prefix")


# ---------------------------------------------------------------------------- weights in several files


async def test_weights_in_several_files_are_used_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    parts = [write_weights(tmp_path / "run" / f"part-{number}.safetensors", number) for number in range(3)]

    async with open_dev_server(weights_root=str(tmp_path)) as (llm, server):

        async def post(path: str, body: dict[str, Any] | None = None) -> None:
            reply = await server.call("POST", path, {} if body is None else body)
            assert (reply.status, reply.body) == (200, b"")

        await post("/init_weight_transfer_engine", {"init_info": {"directory": "run"}})
        await post("/start_weight_update", {"is_checkpoint_format": True})
        await post("/update_weights", {"update_info": {"files": parts[:2]}})
        await post("/update_weights", {"update_info": {"files": parts[2:]}})
        (before,) = await llm.collective_rpc("model_info")
        await post("/finish_weight_update", {"weight_version": "step 7"})
        (after,) = await llm.collective_rpc("model_info")

        assert (before["weight_version"], after["weight_version"]) == ("default", "step 7")
        reply = await server.complete(max_tokens=3, return_weight_versions=True)
        assert [one["version"] for one in reply.json["choices"][0]["weight_versions"]] == ["step 7"]


async def test_an_empty_body_is_enough_where_everything_may_be_left_out(tmp_path: Path) -> None:
    async with open_dev_server(weights_root=str(tmp_path)) as (llm, server):
        assert (await server.call("POST", "/init_weight_transfer_engine")).status == 200
        assert (await server.call("POST", "/start_weight_update")).status == 200

        assert llm._control.state.transfer_directory == str(tmp_path)
        assert llm._control.state.update_files == ()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/init_weight_transfer_engine", {"init_info": []}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"directory": 1}}, "init_info.directory"),
        ("/init_weight_transfer_engine", {"init_info": {"directory": ".."}}, "init_info.directory"),
        ("/init_weight_transfer_engine", {"init_info": {"directory": "missing"}}, "init_info.directory"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "init_info.backend"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/start_weight_update", {"version": "1"}, "version"),
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": "run"}, "version"),
        ("/update_weights", {"version": "1"}, "path"),
        ("/update_weights", {"path": "run", "version": "1", "update_info": {"files": ["a"]}}, "update_info"),
        ("/update_weights", {"update_info": {}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": []}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": "a"}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": [1]}}, "update_info.files.0"),
        ("/update_weights", {"update_info": {"files": ["missing"]}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": ["text"]}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": ["../outside"]}}, "update_info.files"),
        ("/update_weights", {"update_info": {"files": ["a"], "names": []}}, "update_info.names"),
        ("/finish_weight_update", {}, "weight_version"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version"),
        ("/finish_weight_update", {"weight_version": 1}, "weight_version"),
        ("/finish_weight_update", {"weight_version": "x" * 257}, "weight_version"),
        ("/finish_weight_update", {"weight_version": "1", "files": []}, "files"),
    ],
)
async def test_what_is_wrong_with_an_update_is_a_400_that_names_it_and_changes_nothing(
    path: str, body: dict[str, Any], param: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    (root / "run" / "text").write_text("no weights")
    write_weights(tmp_path / "outside")
    async with open_dev_server(weights_root=str(root)) as (llm, server):
        await llm.init_weight_transfer_engine({"directory": str(root / "run")})
        await llm.start_weight_update()
        before = llm._control.state

        reply = await server.call("POST", path, body)

        assert (reply.status, reply.error["param"]) == (400, param)
        assert llm._control.state == before
        assert await works(server)


async def test_without_a_root_no_directory_is_taken() -> None:
    async with open_dev_server() as (_, server):
        assert (await server.call("POST", "/init_weight_transfer_engine", {})).status == 501
