"""What a request holds is freed when it is answered, without the cyclic garbage collector."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import pytest
import trio
import trio.testing

from tests.support.fake_client import HANG, End, FakeClient
from tests.support.http_server import BODIES, BOUND_S, Server, open_server
from trio_llm.errors import EngineGenerateError, InvalidRequestError
from trio_llm.frontend.http.server.shell import reply_to

BIG = json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}}).encode()
JSON = {"content-type": "application/json"}


@pytest.fixture
def manual_gc() -> Iterator[None]:
    """No cyclic garbage at the beginning, and no collection that the test has not asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def post_big(server: Server) -> None:
    assert (await server.call("POST", "/v1/completions", BIG, JSON)).status == 400


async def post_too_big(server: Server) -> None:
    assert (await server.call("POST", "/v1/completions", b" " * 3_000_000, JSON)).status == 413


async def post_nonsense(server: Server) -> None:
    assert (await server.call("POST", "/v1/completions", b"{" * 100_000, JSON)).status == 400


async def post_nowhere(server: Server) -> None:
    assert (await server.call("POST", "/nowhere", BIG, JSON)).status == 404


async def get_version(server: Server) -> None:
    assert (await server.call("GET", "/version")).status == 200


async def get_whole(server: Server) -> None:
    assert (await server.complete(timeout=60)).status == 200


async def get_stream(server: Server) -> None:
    assert (await server.complete(timeout=60, stream=True)).status == 200


async def get_list(server: Server) -> None:
    assert (await server.complete(prompt=["a", "b"], stream=True)).status == 200


async def fail(server: Server) -> None:
    server.client.scripts = [[EngineGenerateError("row failed")]]
    assert (await server.complete()).status == 500


async def fail_in_a_list(server: Server) -> None:
    server.client.scripts = [["a", End()], [EngineGenerateError("row failed")]]
    assert (await server.complete(prompt=["a", "b"])).status == 500


async def fail_amid_a_stream(server: Server) -> None:
    server.client.scripts = [["a", EngineGenerateError("row failed")]]
    assert (await server.complete(stream=True)).status == 200


async def leave(server: Server) -> None:
    server.client.scripts = [["a", HANG]]
    async with server.connect() as connection:
        await connection.request("POST", "/v1/completions", {"prompt": "a", "stream": True})
        await connection.next_event()
    await server.client.wait_idle()


REQUESTS = [
    post_big,
    post_too_big,
    post_nonsense,
    post_nowhere,
    get_version,
    get_whole,
    get_stream,
    get_list,
    fail,
    fail_in_a_list,
    fail_amid_a_stream,
    leave,
]


@pytest.mark.parametrize("ask", REQUESTS, ids=[one.__name__ for one in REQUESTS])
async def test_a_request_leaves_no_ring_of_references(
    ask: Callable[[Server], Awaitable[None]], manual_gc: None
) -> None:
    async with open_server(FakeClient(), max_body_bytes=2_000_000) as server:
        await ask(server)  # the first one loads the routes, and fills caches
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await ask(server)
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()

        left = [repr(one) for one in gc.garbage if _is_of_a_request(one)]

    assert left == []


def _is_of_a_request(one: object) -> bool:
    return isinstance(one, FrameType | BaseException) or type(one).__module__.startswith(("trio_llm", "hypercorn"))


_TEXT = b"a" * 1_000_000
UNREADABLE = {
    "characters behind it": b'{"prompt":"%b"}x' % _TEXT,
    "NaN": b'{"prompt":"%b","temperature":NaN}' % _TEXT,
    "not UTF-8": b'{"prompt":"%b\xff"}' % _TEXT,
    "a lone surrogate": b'{"prompt":"%b\\ud800"}' % _TEXT,
    "cut": b'{"prompt":"%b' % _TEXT,
    "a list": b'["%b"]' % _TEXT,
    "a wrong field": b'{"model":["%b"],"prompt":["%b"],"messages":[],"input":1}' % (_TEXT, _TEXT),
}
"""Big bodies that no path takes."""
PATHS = [*BODIES, "/update_weights", "/collective_rpc"]


@pytest.mark.parametrize("coding", ["identity", "gzip", "cut gzip"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_big_body_that_cannot_be_read_is_freed_with_its_answer(path: str, coding: str, manual_gc: None) -> None:
    bodies = list(UNREADABLE.values())
    if coding != "identity":
        # Level 0: the coded bodies are big, too.
        bodies = [gzip.compress(body, 0)[: -1 if coding == "cut gzip" else None] for body in bodies]
    headers = {**JSON, "content-encoding": coding.removeprefix("cut ")}
    async with open_server(FakeClient(), dev_mode=True) as server:

        async def ask(body: bytes) -> None:
            assert (await server.call("POST", path, body, headers)).status == 400

        await ask(bodies[0])
        await trio.testing.wait_all_tasks_blocked()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for body in bodies:
                await ask(body)
            with trio.fail_after(BOUND_S):  # the thread that has read it may hold the last one for a moment
                while tracemalloc.get_traced_memory()[0] - before > 2 * len(_TEXT):
                    await trio.testing.wait_all_tasks_blocked()
        finally:
            tracemalloc.stop()


def test_a_reply_leaves_nothing_behind_the_error() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            try:
                raise KeyError("cause") from inner
            except KeyError:
                raise InvalidRequestError("outer") from None

    held = Held()
    gone = weakref.ref(held)
    try:
        fail(held)
    except InvalidRequestError as error:
        kept = ExceptionGroup("group", [error])
    del held
    assert gone() is not None

    assert reply_to(kept, "id").status == 400

    assert gone() is None


async def test_a_refused_big_body_is_freed_with_its_answer(manual_gc: None) -> None:
    async with open_server(FakeClient()) as server:
        await post_big(server)
        await trio.testing.wait_all_tasks_blocked()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(3):
                await post_big(server)
            assert tracemalloc.get_traced_memory()[1] - before > 4 * len(BIG), "the body was never there"
            with trio.fail_after(BOUND_S):  # the thread that has read it may hold the last one for a moment
                while tracemalloc.get_traced_memory()[0] - before > len(BIG):
                    await trio.testing.wait_all_tasks_blocked()
        finally:
            tracemalloc.stop()
