"""The time that a client gives its request, and the reply when the server has no room."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.exchange import PATHS, Post
from tests.support.fake_client import HANG, End, FakeClient, Pause
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import open_server
from trio_llm.config import EngineConfig
from trio_llm.errors import InvalidRequestError, OverloadedError, QueuedTokensError, QueueFullError
from trio_llm.frontend.http.server.shell import Message
from trio_llm.frontend.http.server.timeouts import NO_TIMEOUT, RequestTimeout, timeout_of
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest, ToEngine


def assert_nothing_runs(client: FakeClient) -> None:
    assert client.running == []
    assert all(asked.left.is_set() for asked in client.asked)


# ------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    ("header", "field", "expected"), [("2.5", None, 2.5), (None, 3, 3), ("1", 9.0, 1), ("7.", None, 7)]
)
def test_the_header_goes_before_the_field(header: str | None, field: float | None, expected: float) -> None:
    assert timeout_of(header, field, 100.0) == RequestTimeout(expected, 100.0 + expected)


def test_without_either_there_is_no_timeout() -> None:
    assert timeout_of(None, None, 100.0) == NO_TIMEOUT


@pytest.mark.parametrize(
    "header", ["", "0", "-1", "86401", "nan", "inf", "1e3", "1_0", " 1", "\u0661", "9" * 5000, "s"]
)
def test_a_bad_header_is_named_whatever_the_field_says(header: str) -> None:
    with pytest.raises(InvalidRequestError, match="86400") as caught:
        timeout_of(header, 5, 100.0)

    assert caught.value.param == "X-Request-Timeout"


@pytest.mark.parametrize("path", PATHS)
async def test_a_bad_header_is_a_400_and_nothing_is_generated(path: str) -> None:
    client = FakeClient()
    exchange = Post(client, path, header="soon")
    await exchange.run()

    assert exchange.status == 400
    assert exchange.error["param"] == "X-Request-Timeout"
    assert client.asked == []


# ---------------------------------------------------------------------------------- when it is over


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [{"header": "3"}, {"timeout": 3}], ids=["header", "field"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_does_not_begin_in_time_is_a_504_and_is_ended(
    path: str, given: dict[str, Any], stream: bool, autojump_clock: MockClock
) -> None:
    client, began_s = FakeClient(HANG), trio.current_time()
    exchange = Post(client, path, stream=stream, **given)
    await exchange.run()

    assert exchange.status == 504
    assert "3 seconds" in exchange.error["message"]
    assert exchange.error["type"] == "server_error"
    assert exchange.headers[b"x-should-retry"] == b"false"
    assert trio.current_time() - began_s == pytest.approx(3)
    assert len(client.asked) == 1
    assert_nothing_runs(client)


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
async def test_a_whole_answer_that_is_not_finished_in_time_is_a_504(prompt: Any, autojump_clock: MockClock) -> None:
    client = FakeClient("a", Pause(2), "b", HANG)
    exchange = Post(client, prompt=prompt, timeout=60)
    await exchange.run()

    assert exchange.status == 504
    assert_nothing_runs(client)


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
async def test_a_stream_that_has_begun_ends_with_an_error_event(prompt: Any, autojump_clock: MockClock) -> None:
    client, began_s = FakeClient("a", Pause(4), "b", HANG), trio.current_time()
    exchange = Post(client, prompt=prompt, stream=True, timeout=60)
    await exchange.run()

    *_, last, done = exchange.events
    assert exchange.status == 200
    assert json.loads(last)["error"]["code"] == 504
    assert done == "[DONE]"
    assert exchange.body.count(b'"text":"b"') == (1 if prompt == "x" else 3)
    assert exchange.body.count(b": keep-alive") > 3
    assert trio.current_time() - began_s == pytest.approx(60)
    assert_nothing_runs(client)


async def test_a_stream_that_is_never_silent_ends_in_time_too(autojump_clock: MockClock) -> None:
    client = FakeClient(*(step for _ in range(100) for step in ("a", Pause(1))), End())
    exchange = Post(client, stream=True, timeout=9.5)
    await exchange.run()

    assert json.loads(exchange.events[-2])["error"]["code"] == 504
    assert exchange.body.count(b'"text":"a"') == 10
    assert_nothing_runs(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_finished_in_time_is_an_answer(stream: bool, autojump_clock: MockClock) -> None:
    exchange = Post(FakeClient("a", Pause(9), End("b")), stream=stream, header="10")
    await exchange.run()

    assert exchange.status == 200
    assert b"error" not in exchange.body
    assert b'"finish_reason":"stop"' in exchange.body


async def test_a_time_that_ends_while_the_last_event_is_sent_makes_no_error(autojump_clock: MockClock) -> None:
    class SlowPost(Post):
        async def _send(self, message: Message) -> None:
            if b'"finish_reason":"stop"' in message.get("body", b""):
                await trio.sleep(30)
            await super()._send(message)

    exchange = SlowPost(FakeClient("a", End("b")), stream=True, timeout=10)
    await exchange.run()

    assert b"error" not in exchange.body
    assert exchange.events[-1] == "[DONE]"


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_gets_the_timeout_and_never_the_time_to_the_next_comment(
    prompt: Any, stream: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_llm() as fake:
        sent: list[ToEngine] = []
        send = fake.core.send_nowait

        def note(message: ToEngine) -> None:
            sent.append(message)
            send(message)

        monkeypatch.setattr(fake.core, "send_nowait", note)
        await Post(fake.llm, prompt=prompt, stream=stream, timeout=77).run()
        await Post(fake.llm, prompt=prompt, stream=stream).run()

    deadlines = [message.deadline_s for message in sent if isinstance(message, EngineCoreRequest)]
    count = len(deadlines) // 2
    assert deadlines == [pytest.approx(77)] * count + [None] * count
    assert count == (1 if prompt == "x" else 2)


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_the_engine_works_no_longer_than_there_is_time_for_a_client_that_takes_its_own(
    prompt: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowPost(Post):
        async def _send(self, message: Message) -> None:
            if message.get("body"):
                await trio.sleep(60)
            await super()._send(message)

    async with open_fake_llm(step_s=0.1, engine={"max_num_seqs": 1}) as fake:
        sent: list[ToEngine] = []
        send = fake.core.send_nowait

        def note(message: ToEngine) -> None:
            sent.append(message)
            send(message)

        monkeypatch.setattr(fake.core, "send_nowait", note)
        # The first prompt has the engine for longer than there is time; the client takes its first event for longer.
        exchange = SlowPost(fake.llm, prompt=prompt, stream=True, timeout=5, max_tokens=200)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            await trio.sleep(6)
            assert fake.llm.num_running == fake.llm.num_waiting == 0, "the engine goes on with an abandoned request"

    deadlines = [message.deadline_s for message in sent if isinstance(message, EngineCoreRequest)]
    assert deadlines == [pytest.approx(5)] * len(prompt), "nothing is sent again"
    assert json.loads(exchange.events[-2])["error"]["code"] == 504
    assert exchange.events[-1] == "[DONE]"


async def test_a_stream_that_waits_longer_than_many_comments_is_answered_in_the_end(
    autojump_clock: MockClock,
) -> None:
    async with (
        open_fake_llm(step_s=0.1, engine={"max_num_seqs": 1}) as fake,
        fake.llm.generate([1], SamplingParams(max_tokens=1000)),
    ):
        exchange = Post(fake.llm, stream=True, max_tokens=3)
        await exchange.run()

    assert exchange.body.count(b": keep-alive") > 5
    assert b'"finish_reason":"length"' in exchange.body


# ------------------------------------------------------------------------------------- no room left


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [QueueFullError("8 of 8"), QueuedTokensError("99 of 100", retry_after_s=2.5)])
async def test_a_refusal_for_the_load_is_a_429_before_anything_is_sent(
    path: str, stream: bool, error: OverloadedError
) -> None:
    client = FakeClient()
    client.admission_error = error
    async with open_server(client) as server:
        reply = await server.call("POST", path, {**PATHS[path], "stream": stream})

    assert reply.status == 429
    assert reply.error["type"] == "rate_limit_error"
    assert reply.error["message"] == str(error)
    assert reply.headers["retry-after"] == ("1" if isinstance(error, QueueFullError) else "3")
    assert "x-should-retry" not in reply.headers


async def test_a_full_server_refuses_and_serves_again_when_there_is_room(autojump_clock: MockClock) -> None:
    async with open_fake_llm(engine={"max_num_queued_reqs": 1}) as fake:
        async with fake.llm.generate([1], SamplingParams(max_tokens=1000)):
            refused = Post(fake.llm)
            await refused.run()
        await fake.llm.wait_idle()
        answered = Post(fake.llm)
        await answered.run()

    assert (refused.status, answered.status) == (429, 200)
    assert "limit of this server is 1 (--max-num-queued-reqs)" in refused.error["message"]


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_num_queued_reqs": 2}, {"prompt": ["x", "y", "z"]}),
        ({"max_num_queued_reqs": 5}, {"prompt": ["x", "y", "z"], "n": 2, "temperature": 1}),
        ({"max_num_queued_tokens": 10}, {"prompt": ["x" * 8, "y" * 8]}),
    ],
)
async def test_more_prompts_than_could_ever_be_let_in_are_a_400(limits: dict[str, int], fields: dict[str, Any]) -> None:
    client = FakeClient()
    client.config = EngineConfig(**limits)  # type: ignore[arg-type]
    exchange = Post(client, **fields)
    await exchange.run()

    assert exchange.status == 400
    assert exchange.error["param"] == "prompt"
    assert client.asked == []
