"""A server with chosen answers on a real port, for tests of what talks to one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve


@dataclass
class Answer:
    """What one POST gets."""

    pieces: list[bytes]
    status: int = 200
    hangs: bool = False
    """After the pieces, nothing until the client leaves."""


def event(**value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def said(text: str, *, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}])


DONE = b"data: [DONE]\n\n"


@dataclass
class ScriptedServer:
    """Answers in order; the last health stays. Runs in a thread, since what is tested runs Trio itself."""

    answers: list[Answer] = field(default_factory=list)
    healths: list[tuple[int, dict[str, Any]]] = field(default_factory=lambda: [(200, {"status": "ready"})])
    requests: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """A client has left a hanging answer."""
    url: str = ""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http", "no lifespan here"  # raising is how an ASGI app says so
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/health":
            status, health = self.healths.pop(0) if len(self.healths) > 1 else self.healths[0]
            await self._reply(send, Answer([json.dumps(health).encode()], status))
            return
        assert scope["path"] == "/v1/chat/completions"
        self.requests.append(json.loads(body))
        answer = self.answers.pop(0)
        await self._reply(send, answer, end=not answer.hangs)
        if answer.hangs:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

    async def _reply(self, send: Any, answer: Answer, *, end: bool = True) -> None:
        await send({"type": "http.response.start", "status": answer.status, "headers": []})
        for piece in answer.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if end:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serve on a free port inside the block, and set `url`."""
    started = threading.Event()
    stop = trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        config = Config()
        config.bind = ["127.0.0.1:0"]
        config.errorlog = None
        config.graceful_timeout = 1
        async with trio.open_nursery() as nursery:

            async def start(*, task_status: Any) -> None:
                await serve(server.app, config, shutdown_trigger=stop.wait, task_status=task_status)

            server.url = (await nursery.start(start))[0]
            started.set()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=tokens[0])
        thread.join(10)
        assert not thread.is_alive()
