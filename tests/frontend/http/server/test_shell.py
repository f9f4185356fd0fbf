"""The shell around every route: endings, ids, headers, and protocols it does not serve."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.support.exchange import Exchange
from tests.support.fake_client import FakeClient
from tests.support.http_server import open_server
from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.http.server.shell import ASGIApp, Receive, Scope, Send


def answers(body: bytes, *, content_type: bytes = b"text/plain", fails: Exception | None = None) -> ASGIApp:
    """An app that sends `body` as one piece, then fails or ends."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if fails is not None:
            raise fails
        await send({"type": "http.response.body", "body": b"!"})

    return app


def fails_with(make: Callable[[], BaseException]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise make()

    return app


async def test_the_last_message_is_sent_when_the_app_and_its_watcher_have_ended() -> None:
    order: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answers(b"a")(scope, receive, send)
        await trio.lowlevel.checkpoint()
        order.append("app has ended")

    class Recycling(Exchange):
        async def after_last(self) -> None:
            await super().after_last()
            # Hypercorn goes on in the app's task, and a cancellation here would leak the connection.
            await trio.testing.wait_all_tasks_blocked()
            order.append("connection recycled")

    exchange = Recycling(app)
    await exchange.run()

    assert order == ["app has ended", "connection recycled"]
    assert exchange.body == b"a!"


async def test_nothing_is_sent_after_a_disconnect() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await answers(b"late")(scope, receive, send)

    exchange = Exchange(app)
    exchange.feed.send_nowait({"type": "http.disconnect"})
    await exchange.run()

    assert exchange.sent == []


async def test_a_client_that_has_gone_already_does_not_reach_the_app() -> None:
    reached = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(True)
        await trio.lowlevel.checkpoint_if_cancelled()
        reached.append(False)

    for _ in range(20):  # Trio runs tasks in random order
        exchange = Exchange(app)
        exchange.feed.send_nowait({"type": "http.disconnect"})
        await exchange.run()

    assert reached == []


async def test_an_unexpected_error_before_the_response_is_a_500_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(fails_with(lambda: KeyError("secret /etc/passwd")))
    await exchange.run()

    assert exchange.status == 500
    assert exchange.headers[b"x-should-retry"] == b"false"
    assert b"secret" not in exchange.body
    assert "secret" in caplog.text


async def test_an_error_inside_groups_is_answered_as_itself() -> None:
    exchange = Exchange(
        fails_with(lambda: ExceptionGroup("", [ExceptionGroup("", [EngineGenerateError("the row failed")])]))
    )
    await exchange.run()

    assert exchange.status == 500
    assert b"the row failed" in exchange.body


async def test_of_several_errors_the_one_of_this_package_is_answered() -> None:
    exchange = Exchange(fails_with(lambda: ExceptionGroup("", [KeyError("x"), EngineGenerateError("the row failed")])))
    await exchange.run()

    assert b"the row failed" in exchange.body


async def test_an_error_amid_an_event_stream_becomes_its_ending() -> None:
    app = answers(b"data: 1\n\n", content_type=b"text/event-stream", fails=EngineGenerateError("the row failed"))
    exchange = Exchange(app)
    await exchange.run()

    assert exchange.body.startswith(b'data: 1\n\ndata: {"error":{"message":"the row failed"')
    assert exchange.body.endswith(b"}\n\ndata: [DONE]\n\n")
    assert exchange.sent[-1]["more_body"] is False


async def test_an_error_amid_another_body_leaves_it_visibly_short() -> None:
    exchange = Exchange(answers(b"half", fails=EngineGenerateError("the row failed")))
    await exchange.run()

    assert exchange.body == b"half"
    assert exchange.sent[-1]["more_body"] is True


async def test_an_app_that_does_not_answer_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.lowlevel.checkpoint()

    exchange = Exchange(app)
    await exchange.run()

    assert exchange.status == 500


async def test_a_cancellation_from_outside_is_not_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep_forever()

    exchange = Exchange(app)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()

    assert scope.cancelled_caught
    assert exchange.sent == []


async def test_waiting_for_idle_ends_when_the_last_request_does() -> None:
    go_on = trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await answers(b"a")(scope, receive, send)

    exchange = Exchange(app)
    ended: list[str] = []

    async def wait() -> None:
        await exchange.shell.wait_idle()
        ended.append("idle")

    await exchange.shell.wait_idle()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        go_on.set()

    assert ended == ["idle"]


async def test_connections_close_after_their_answer_while_draining() -> None:
    exchange = Exchange(answers(b"a"), is_draining=True)
    await exchange.run()

    assert exchange.headers[b"connection"] == b"close"


async def test_the_clients_request_id_comes_back() -> None:
    exchange = Exchange(answers(b"a"), headers=[(b"x-request-id", b"my-id:1")])
    await exchange.run()

    assert exchange.headers[b"x-request-id"] == b"my-id:1"
    assert exchange.scope["state"] == {"request_id": "my-id:1", "client_request_id": "my-id:1"}


@pytest.mark.parametrize("given", [b"", b"a b", b"a\xff", b"x" * 129, b'"'])
async def test_a_request_id_that_could_break_a_log_or_a_header_is_replaced(given: bytes) -> None:
    exchange = Exchange(answers(b"a"), headers=[(b"x-request-id", given)])
    await exchange.run()

    assert len(exchange.headers[b"x-request-id"]) == 32
    assert exchange.scope["state"]["client_request_id"] is None


async def test_http_2_is_refused_with_a_505() -> None:
    exchange = Exchange(answers(b"a"), http_version="2")
    await exchange.run()

    assert exchange.status == 505
    assert b"HTTP/1.1" in exchange.body


async def test_a_websocket_is_refused() -> None:
    exchange = Exchange(answers(b"a"), type="websocket")
    await exchange.run()

    assert [message["type"] for message in exchange.sent] == ["websocket.close"]


async def test_the_server_does_not_log_an_error_for_a_bad_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with open_server(FakeClient()) as server:
        assert (await server.chat(temperature="hot")).status == 400

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
