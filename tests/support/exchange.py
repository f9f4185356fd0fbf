"""Exchange: one request to the shell, in memory, with what a server does around it.

Used by the tests of the HTTP server that need no sockets.
"""

from __future__ import annotations

import json
from typing import Any

import trio

from tests.support.http_server import BODIES
from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.answers.generation import RunningRequests
from trio_llm.frontend.http.routes import create_routes
from trio_llm.frontend.http.server.shell import ASGIApp, Message, Scope, Shell

PATHS = {path: BODIES[path] for path in ("/v1/chat/completions", "/v1/completions")}
"""The generating paths, each with a body that it takes."""


class Exchange:
    """One request to a shell in memory, and what it sends."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        body: bytes | None = b"",
        config: ServerConfig | None = None,
        is_draining: bool = False,
        **scope: object,
    ) -> None:
        self.sent: list[Message] = []
        self.is_over = False
        self.shell = Shell(app, config or ServerConfig(), is_draining=lambda: is_draining)
        self.scope: Scope = {"type": "http", "http_version": "1.1", "headers": [], **scope}
        self.feed, self._messages = trio.open_memory_channel[Message](10)
        if body is not None:
            self.feed.send_nowait({"type": "http.request", "body": body, "more_body": False})

    async def run(self) -> None:
        await self.shell(self.scope, self._messages.receive, self._send)

    async def feed_endlessly(self) -> None:
        """Send pieces of a body until the exchange is over."""
        while not self.is_over:
            await self.feed.send({"type": "http.request", "body": b"x", "more_body": True})

    async def _send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await self.after_last()

    async def after_last(self) -> None:
        """What the server does once it has the last message: it tells the app that the exchange is over."""
        await self.feed.send({"type": "http.disconnect"})
        self.is_over = True

    @property
    def status(self) -> int:
        status = self.sent[0]["status"]
        assert isinstance(status, int)
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


class Post(Exchange):
    """One request to the model over the routes, in memory."""

    def __init__(
        self, client: EngineClient, path: str = "/v1/completions", *, header: str | None = None, **fields: Any
    ) -> None:
        headers = [(b"content-type", b"application/json")]
        if header is not None:
            headers.append((b"x-request-timeout", header.encode("latin-1")))
        super().__init__(
            create_routes(client, ServerConfig(), RunningRequests()),
            body=json.dumps({**BODIES[path], **fields}).encode(),
            method="POST",
            path=path,
            headers=headers,
            query_string=b"",
        )

    @property
    def error(self) -> dict[str, Any]:
        """The error that the answer is."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error["code"] == self.status
        return error

    @property
    def events(self) -> list[str]:
        """Data of the events; comments are left out."""
        blocks = self.body.decode().split("\n\n")
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
