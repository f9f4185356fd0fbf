"""`trio-llm chat`: a conversation with a server in the terminal, each answer streamed.

The prompt loop is plain code, and each answer is one `trio.run`: reading a line then needs no thread, and Ctrl-C
at the prompt and Ctrl-C in an answer stay two things.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TextIO, TypeVar

import msgspec
import trio

from trio_llm.cli.http_client import Address, Response, ServerError, open_request
from trio_llm.cli.sse import EventParser

__all__ = ["ChatOptions", "Conversation", "ask", "run_chat", "wait_for_server"]

_POLL_S: Final = 0.25
"""Between two looks at a server that is loading."""
_CONTROLS: Final = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""What a model could steer the terminal with. Left out of what is shown, kept in what is sent back."""


_ENDINGS: Final[dict[str | None, tuple[str, int]]] = {
    "abort": ("(ended by the server)", 1),
    "length": ("(cut: the limit of tokens was reached)", 0),
}
"""Finish reasons of an answer that is not whole: what is said of it, and the exit code if it is the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What goes with every question; None: the server decides."""

    model: str | None = None
    system_prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Conversation:
    """What was said so far, and the body of the next request."""

    options: ChatOptions
    turns: list[dict[str, str]] = field(default_factory=list)
    """Messages in the API's form, a user's first, the two roles in turn."""

    def body(self, question: str) -> dict[str, Any]:
        """The request for an answer to `question`."""
        system = self.options.system_prompt
        first = [] if system is None else [{"role": "system", "content": system}]
        body = {
            "model": self.options.model,
            "messages": [*first, *self.turns, {"role": "user", "content": question}],
            "stream": True,
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }
        return {name: value for name, value in body.items() if value is not None}

    def remember(self, question: str, answer: str) -> None:
        """Add a turn. One without an answer is left out, so that the roles keep alternating."""
        if answer:
            self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run_chat(url: str, options: ChatOptions, *, question: str | None = None) -> int:
    """Chat with the server at `url`: one question, or until the end of input. Returns the exit code.

    Raises:
        ConfigError: `url` is no address.
        ServerError: the server is not there, or refused the only question.
    """
    address = Address.parse(url)
    conversation = Conversation(options)
    _prepare_terminal()
    if not trio.run(_until_interrupted, partial(wait_for_server, address)):
        return 130
    if question is not None:
        return _answer(address, conversation, question)
    print(f"Chatting with {address}. Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
    while (line := _read_line()) is not None:
        if line.strip():
            try:
                _answer(address, conversation, line)
            except ServerError as error:
                # The chat goes on: the next question may work, and what was said so far is not lost.
                print(f"trio-llm: {error}", file=sys.stderr)
    return 0


def _prepare_terminal() -> None:
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        # A character that the terminal does not know must not end the chat.
        reconfigure(errors="replace")
    if sys.stdin.isatty():
        # Its import is its effect: `input` gets line editing and a history. Some builds of Python lack it.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")


def _read_line() -> str | None:
    """The next question; None at the end of input. Ctrl-C drops a line that was begun."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _answer(address: Address, conversation: Conversation, question: str) -> int:
    """Stream an answer to stdout and remember it, as far as it came. Says on stderr if it was cut.

    Returns the exit code that suits it: 1 for one that the server cut, 130 for Ctrl-C.
    """
    pieces: list[str] = []
    reasons: list[str | None] = []

    def show(text: str) -> None:
        pieces.append(text)
        print(text.translate(_CONTROLS), end="", flush=True)

    async def stream() -> None:
        reasons.append(await ask(address, conversation.body(question), show))

    try:
        finished = trio.run(_until_interrupted, stream)
    finally:
        if pieces:
            print()
        conversation.remember(question, "".join(pieces))
    if not finished:
        return 130
    note, code = _ENDINGS.get(reasons[0], (None, 0))
    if note is not None:
        print(note, file=sys.stderr)
    return code


async def _until_interrupted(work: Callable[[], Awaitable[None]]) -> bool:
    """Await `work()`; Ctrl-C cancels it. True: it came to its end.

    Cancellation: cancels `work`.

    Raises:
        Exception: whatever `work` raised.
    """
    failure: Exception | None = None
    finished = False
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def cancel_on_signal() -> None:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(cancel_on_signal)
            try:
                await work()
                finished = True
            except Exception as error:
                failure = error  # raised outside of the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return finished


async def wait_for_server(address: Address, *, stream: TextIO | None = None) -> None:
    """Return once the server is ready, saying so on `stream` (stderr) while it is still loading.

    Cancellation: safe.

    Raises:
        ServerError: nothing listens there, or its engine is gone.
    """
    told = ""
    while True:
        async with open_request(address, "GET", "/health") as response:
            if response.status == 200:
                return
            health = _parse(await response.read(), _Health)
        if health.status != "loading":
            raise ServerError(f"the server at {address} is not ready: {_reason(health, response.status)}")
        phase = f" ({health.phase})" if health.phase else ""
        line = f"the server is loading its model{phase}, please wait"
        if line != told:
            print(line, file=stream or sys.stderr, flush=True)
            told = line
        await trio.sleep(_POLL_S)


async def ask(address: Address, body: dict[str, Any], show: Callable[[str], None]) -> str | None:
    """Send a chat request that streams, and hand every piece of the answer's text to `show` as it comes.

    Returns the finish reason, None if the server gave none.

    Cancellation: the connection is closed, which ends the request in the server; `show` has had what came.

    Raises:
        ServerError: the server refused the request, or the answer ended in an error or without its end.
    """
    finish_reason = None
    async with open_request(address, "POST", "/v1/chat/completions", json_body=body) as response:
        if response.status != 200:
            raise ServerError(_reason(_parse(await response.read(), _Refusal), response.status))
        async for data in _events(response):
            if data == "[DONE]":
                return finish_reason
            chunk = _parse(data, _Chunk)
            if chunk.error is not None:
                raise ServerError(f"the answer was cut short: {_reason(chunk, response.status)}")
            for choice in chunk.choices:
                finish_reason = choice.finish_reason or finish_reason
                if choice.delta.content:
                    show(choice.delta.content)
    raise ServerError("the answer was cut short: the stream ended without its last event")


async def _events(response: Response) -> AsyncIterator[str]:
    parser = EventParser()
    async for piece in response.pieces():
        for data in parser.feed(piece):
            yield data


# What is read of the server's answers; other fields are ignored.


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None


class _Health(_Refusal):
    status: str = ""
    phase: str | None = None
    reason: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(_Refusal):
    choices: list[_Choice] = []


_Parsed = TypeVar("_Parsed", bound=_Refusal)


def _parse(text: str | bytes, kind: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ServerError(f"the server sent what is no answer of this API: {text[:100]!r}") from None


def _reason(body: _Refusal, status: int) -> str:
    """What an error reply says, or its status if it says nothing."""
    if body.error is not None and body.error.message:
        return body.error.message
    if isinstance(body, _Health) and (said := body.reason or body.status):
        return said
    return f"HTTP status {status}"
