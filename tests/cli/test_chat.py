"""`trio-llm chat` against a server on a real port."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Iterator

import pytest
import trio

from tests.support.scripted_server import DONE, Answer, ScriptedServer, event, running, said
from trio_llm.cli.chat import ask, wait_for_server
from trio_llm.cli.http_client import Address, ServerError, ServerUnreachableError, open_request
from trio_llm.cli.main import run
from trio_llm.errors import ConfigError

HELLO = Answer([said("Hel"), said("lo"), DONE])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer()) as server:
        yield server


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


class StdoutThatInterrupts(io.StringIO):
    """Presses Ctrl-C when it is shown a text."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def write(self, text: str) -> int:
        if self._at in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


# ------------------------------------------------------------------------------------ one question


def test_one_question_prints_the_answer_and_ends(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [HELLO]

    assert run(["chat", server.url, "-q", "Hi?", "--temperature", "0", "--max-tokens", "5", "--model", "m"]) == 0

    assert capsys.readouterr().out == "Hello\n"
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi?"}],
            "stream": True,
            "max_tokens": 5,
            "temperature": 0,
        }
    ]


def test_what_was_not_asked_for_is_left_to_the_server(server: ScriptedServer) -> None:
    server.answers = [HELLO]

    run(["chat", server.url, "-q", "Hi?", "--system-prompt", "Be brief."])

    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}
    assert server.requests == [{"messages": [system, user], "stream": True}]


def test_how_the_stream_is_cut_does_not_change_the_answer(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = b": keep-alive\n\n" + said("né ") + said("🙂") + event(choices=[], usage={}) + DONE
    server.answers = [Answer([stream[i : i + 1] for i in range(len(stream))])]

    assert run(["chat", server.url, "-q", "Hi?"]) == 0
    assert capsys.readouterr().out == "né 🙂\n"


def test_an_answer_cannot_steer_the_terminal(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [Answer([said("a\x1b[2Jb\x9b1mc\r\x07\n\td"), DONE]), HELLO]
    type_lines(monkeypatch, "Hi?", "And now?")

    run(["chat", server.url])

    assert capsys.readouterr().out.startswith("a[2Jb1mc\n\td\n")
    assert server.requests[1]["messages"][1]["content"] == "a\x1b[2Jb\x9b1mc\r\x07\n\td"


@pytest.mark.parametrize(
    ("answer", "shown", "reported"),
    [
        (Answer([b'{"error": {"message": "no such model"}}'], status=404), "", "no such model"),
        (Answer([b"{}"], status=500), "", "HTTP status 500"),
        (Answer([b"<html>"], status=502), "", "not an answer of this API"),
        (Answer([said("Hel"), event(error={"message": "the engine died"}), DONE]), "Hel\n", "the engine died"),
        (Answer([said("Hel")]), "Hel\n", "without its last event"),
        (Answer([b"data: [1]\n\n"]), "", "not an answer of this API"),
    ],
)
def test_a_failed_answer_is_one_line_and_exit_code_1(
    answer: Answer, shown: str, reported: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [answer]

    assert run(["chat", server.url, "-q", "Hi?"]) == 1

    printed = capsys.readouterr()
    assert printed.out == shown
    assert printed.err.startswith("trio-llm: ")
    assert reported in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("reason", "code", "note"),
    [
        ("stop", 0, ""),
        ("length", 0, "(cut: the limit of tokens was reached)\n"),
        ("abort", 1, "(ended by the server)\n"),
        ("a reason from the future", 0, ""),
    ],
)
def test_a_cut_answer_is_distinguished_from_a_whole_one(
    reason: str, code: int, note: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    # The usage's chunk comes after it and has no choice.
    server.answers = [Answer([said("Hel"), said("lo", finish_reason=reason), event(choices=[], usage={}), DONE])]

    assert run(["chat", server.url, "-q", "Hi?"]) == code

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("Hello\n", note)


def test_an_answer_that_the_server_ended_does_not_end_the_chat(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [Answer([said("Hel", finish_reason="abort"), DONE]), HELLO]
    type_lines(monkeypatch, "Hi?", "And now?")

    assert run(["chat", server.url]) == 0

    printed = capsys.readouterr()
    assert printed.out == "Hel\nHello\n"
    assert printed.err.count("(ended by the server)") == 1


def test_ctrl_c_ends_the_only_answer_and_the_server_sees_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [Answer([said("endless")], hangs=True)]
    monkeypatch.setattr(sys, "stdout", StdoutThatInterrupts("endless"))

    assert run(["chat", server.url, "-q", "Hi?"]) == 130

    assert server.left.wait(10)


# ------------------------------------------------------------------------------------ conversation


def test_each_question_brings_what_was_said_before(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [HELLO, Answer([said("Bye"), DONE])]
    type_lines(monkeypatch, "Hi?", "", "And now?")

    assert run(["chat", server.url]) == 0

    assert [[turn["content"] for turn in body["messages"]] for body in server.requests] == [
        ["Hi?"],
        ["Hi?", "Hello", "And now?"],
    ]


def test_an_error_does_not_end_the_chat_and_leaves_no_turn(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [Answer([b'{"error": {"message": "too long"}}'], status=400), HELLO]
    type_lines(monkeypatch, "War and Peace", "Hi?")

    assert run(["chat", server.url]) == 0

    printed = capsys.readouterr()
    assert "trio-llm: too long" in printed.err
    assert printed.out == "Hello\n"
    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["Hi?"]


def test_ctrl_c_ends_the_answer_and_not_the_chat(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [Answer([said("endless")], hangs=True), HELLO]
    type_lines(monkeypatch, "Hi?", "And now?")
    stdout = StdoutThatInterrupts("endless")
    monkeypatch.setattr(sys, "stdout", stdout)

    assert run(["chat", server.url]) == 0

    assert server.left.wait(10)
    assert stdout.getvalue() == "endless\nHello\n"
    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["Hi?", "endless", "And now?"]


# ---------------------------------------------------------------------------------- before a chat


def test_a_missing_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running(ScriptedServer()) as server:
        url = server.url

    assert run(["chat", url, "-q", "Hi?"]) == 1

    error = capsys.readouterr().err
    assert error == f"trio-llm: no server answers at {url} (Connection refused); start one with `trio-llm serve`\n"


async def test_a_loading_server_is_waited_for_and_shown_once_per_phase(server: ScriptedServer) -> None:
    server.healths = [
        (503, {"status": "loading", "phase": "convert"}),
        (503, {"status": "loading", "phase": "convert"}),
        (503, {"status": "loading", "phase": "load"}),
        (200, {"status": "ready"}),
    ]
    shown = io.StringIO()

    with trio.fail_after(30):
        await wait_for_server(Address.parse(server.url), stream=shown)

    assert shown.getvalue().splitlines() == [
        "the server is loading its model (convert), please wait",
        "the server is loading its model (load), please wait",
    ]


async def test_a_server_whose_engine_is_dead_is_not_waited_for(server: ScriptedServer) -> None:
    server.healths = [(503, {"status": "dead", "reason": "CUDA error"})]

    with pytest.raises(ServerError, match="CUDA error"):
        await wait_for_server(Address.parse(server.url))


async def test_cancelling_a_question_closes_the_connection(server: ScriptedServer) -> None:
    server.answers = [Answer([said("endless")], hangs=True)]

    with trio.CancelScope() as scope:
        await ask(Address.parse(server.url), {"messages": []}, lambda text: scope.cancel())

    assert scope.cancelled_caught
    assert await trio.to_thread.run_sync(server.left.wait, 10)


async def test_a_server_that_does_not_speak_http_has_an_error_of_its_own() -> None:
    async def shout(stream: trio.SocketStream) -> None:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, shout, [listener])
        address = Address.parse(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        with pytest.raises(ServerError, match="does not speak HTTP"):
            async with open_request(address, "GET", "/health"):
                pass
        nursery.cancel_scope.cancel()


async def test_an_answer_that_breaks_off_is_an_error_and_not_an_end() -> None:
    async def break_off(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, break_off, [listener])
        address = Address.parse(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        async with open_request(address, "GET", "/") as response:
            with pytest.raises(ServerUnreachableError, match="before the answer's end"):
                await response.read()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost", "http://localhost:80"),
        ("https://example.org/llm/v1/", "https://example.org:443/llm"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses_are_read_in_the_forms_people_write(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("http://h:1/v1/models/", "http://h:1"),
        ("h:1/health", "http://h:1"),
        ("https://h/api/v1/completions", "https://h/api"),
        ("https://h/api/metrics", "https://h/api"),
        ("http://h:1/v1?key=1", "http://h:1"),
    ],
)
def test_the_url_of_a_path_is_refused_with_the_form_that_is_wanted(url: str, right: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"write it like {right}, with or without /v1")):
        Address.parse(url)


def test_a_server_below_a_path_has_an_address_too() -> None:
    assert str(Address.parse("https://h/api/v1/")) == "https://h:443/api"
