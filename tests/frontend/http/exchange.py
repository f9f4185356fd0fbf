"""Exchange: one request to the shell, in memory, with what a server does around it.

Used by the tests of the HTTP server that need no sockets.
"""

from __future__ import annotations

import trio

from trio_llm.config import ServerConfig
from trio_llm.frontend.http.shell import ASGIApp, Message, Scope, Shell


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
