"""A real server on a free port, a plain HTTP/1.1 connection to it, and readers of event streams.

Used by the tests of the HTTP server. Everything here waits with a bound.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import trio
import trio.testing

from trio_llm.config import ServerConfig
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.serve import serve
from trio_llm.frontend.http.server.listeners import open_listeners
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger

BOUND_S = 10
"""Nothing here takes so long unless it is broken."""


def num_descriptors() -> int:
    """Descriptors that this process has open, client and server."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def wait_descriptors(at_most: int) -> None:
    with trio.fail_after(BOUND_S):
        while num_descriptors() > at_most:
            await trio.testing.wait_all_tasks_blocked()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error

    @property
    def events(self) -> list[str]:
        """Data of the events, in order; comments are left out."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events as JSON, without the end mark, which must be there once, at the end."""
        events = self.events
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


class Connection:
    """One TCP connection to the server. Replies are read one after the other."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(self, data: bytes) -> None:
        with trio.fail_after(BOUND_S):
            await self.stream.send_all(data)

    async def request(
        self, method: str, path: str, body: bytes | dict[str, Any] = b"", headers: dict[str, str] | None = None
    ) -> None:
        """Send one request, and be ready to read its reply."""
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            headers = {"content-type": "application/json", **(headers or {})}
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        fields = {"host": "test", "content-length": str(len(body)), **(headers or {})}
        data = self._h11.send(h11.Request(method=method, target=path, headers=list(fields.items())))
        data += self._h11.send(h11.Data(body)) + self._h11.send(h11.EndOfMessage())
        await self.send(data)

    async def next_event(self) -> Any:
        with trio.fail_after(BOUND_S):
            while True:
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    return event
                try:
                    self._h11.receive_data(await self.stream.receive_some())
                except trio.BrokenResourceError:
                    self._h11.receive_data(b"")

    async def reply(self) -> Reply:
        """The whole next reply."""
        head = await self.next_event()
        assert isinstance(head, h11.Response), head
        body = b"".join([part async for part in self.body_parts()])
        return Reply(head.status_code, {n.decode(): v.decode() for n, v in head.headers}, body)

    async def body_parts(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self.next_event(), h11.Data):
            yield bytes(event.data)
        assert isinstance(event, h11.EndOfMessage), event

    async def wait_closed(self) -> None:
        """Wait until the server has closed the connection; fail if it sends anything more."""
        with trio.fail_after(BOUND_S):
            with suppress(trio.BrokenResourceError):
                assert await self.stream.receive_some() == b""


@dataclass
class Server:
    client: Any
    """An EngineClient, often a fake one with more to look at."""
    url: str
    port: int
    stop: trio.Event
    stopped: trio.Event = field(default_factory=trio.Event)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            yield Connection(stream)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] = b"",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own."""
        async with self.connect() as connection:
            await connection.request(method, path, body, headers)
            return await connection.reply()

    async def ask(self, path: str, **fields: Any) -> Reply:
        """A good request to a path of `BODIES`, with these fields added."""
        return await self.call("POST", path, {**BODIES[path], **fields})

    async def chat(self, **fields: Any) -> Reply:
        return await self.ask("/v1/chat/completions", **fields)

    async def complete(self, **fields: Any) -> Reply:
        return await self.ask("/v1/completions", **fields)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "Once"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": {"input": "Once"},
    "/pooling": {"input": "Once"},
    "/score": {"text_1": "Once", "text_2": ["Twice", "more"]},
}
"""Each path that asks the model, with a body that it takes."""


@asynccontextmanager
async def open_server(
    client: EngineClient, *, metrics: PrometheusStatLogger | None = None, **settings: Any
) -> AsyncIterator[Server]:
    """A server for `client`. It is cancelled at the end unless the test has stopped it."""
    config = ServerConfig(port=0, **settings)
    listeners = open_listeners(config)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        server = Server(client, "", 0, stop)

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(client, config, metrics=metrics, listeners=listeners, stop=stop, task_status=task_status)
            server.stopped.set()

        [server.url] = await nursery.start(run)
        server.port = int(server.url.rpartition(":")[2])
        yield server
        nursery.cancel_scope.cancel()


async def ask(client: EngineClient, path: str, **fields: Any) -> Reply:
    """`Server.ask` of a server for `client` that is there for this one request."""
    async with open_server(client) as server:
        return await server.ask(path, **fields)
