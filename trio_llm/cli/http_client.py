"""A small HTTP/1.1 client: one request per connection, the answer's body as it arrives.

h11 over a Trio stream. Used by `trio-llm chat`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import h11
import trio

from trio_llm.errors import ConfigError, TrioLLMError
from trio_llm.version import __version__

__all__ = ["Address", "Response", "ServerError", "ServerUnreachableError", "open_request"]

_PATHS = ("/health", "/readyz", "/livez", "/startupz", "/version", "/metrics", "/openapi.json", "/pooling", "/score")
"""What a pasted URL may end with that is a path of the server and not the prefix of all its paths."""
_CHUNK_BYTES = 65536
_MAX_BODY_BYTES = 16 * 1024 * 1024
"""The largest answer that is read whole."""


class ServerError(TrioLLMError):
    """The server answered with an error, or with something that is not an answer."""


class ServerUnreachableError(ServerError):
    """No server listens there, or the connection broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    tls: bool
    root: str
    """Prefix of the server's paths; empty, or without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read `http://host:port`, with or without `http://` and with or without `/v1` at the end.

        Raises:
            ConfigError: it is not such an address.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"URL {url!r} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"URL {url!r} is not an address; write it like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        if "/v1/" in f"{root}/" or root.endswith(_PATHS) or parts.query or parts.fragment:
            before = root.partition("/v1/")[0].removesuffix(next(filter(root.endswith, _PATHS), ""))
            right = f"{parts.scheme}://{parts.netloc}{before}"
            raise ConfigError(
                f"URL {url!r} is more than the address of a server; write it like {right}, with or without /v1"
            )
        return cls(host=host, port=port if port is not None else 443 if tls else 80, tls=tls, root=root)

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.root}"


class Response:
    """An answer whose head has arrived. Made by `open_request`, and to be used inside its block."""

    def __init__(self, wire: _Wire, head: h11.Response) -> None:
        self._wire = wire
        self.status: int = head.status_code
        self.headers: Mapping[str, str] = {
            name.decode().lower(): value.decode("latin-1") for name, value in head.headers
        }

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, in pieces as they arrive.

        Cancellation: the rest is lost; leave the block.

        Raises:
            ServerUnreachableError: the connection broke before the body's end.
        """
        while isinstance(event := await self._wire.receive(), h11.Data):
            yield bytes(event.data)

    async def read(self) -> bytes:
        """The whole body.

        Cancellation: as for `pieces`.

        Raises:
            ServerError: it is larger than 16 MiB.
            ServerUnreachableError: the connection broke before its end.
        """
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                raise ServerError(f"the server's answer is larger than {_MAX_BODY_BYTES} bytes")
        return bytes(body)


@asynccontextmanager
async def open_request(
    address: Address, method: str, path: str, *, json_body: Mapping[str, Any] | None = None
) -> AsyncIterator[Response]:
    """Send a request on a connection of its own and wait for the head of the answer.

    Cancellation: the connection is closed, so that the server stops working for the request.

    Raises:
        ServerUnreachableError: no server listens at `address`, or the connection broke.
        ServerError: the server at this address does not speak HTTP.
    """
    try:
        stream = await _connect(address)
    except OSError as error:
        raise ServerUnreachableError(
            f"no server answers at {address} ({_first_cause(error)}); start one with `trio-llm serve`"
        ) from None
    try:
        wire = _Wire(stream, address)
        await wire.send(_request_events(address, method, path, json_body))
        yield Response(wire, await wire.receive_head())
    finally:
        # Without a handshake: the answer was read, or the rest of it is not wanted.
        await trio.aclose_forcefully(stream)


def _first_cause(error: OSError) -> str:
    """The system's error text. If every address of a host fails, Trio puts the failures into a group, as the cause."""
    group = error.__cause__
    causes = group.exceptions if isinstance(group, BaseExceptionGroup) else ()
    texts = [cause.strerror for cause in (*causes, error) if isinstance(cause, OSError) and cause.strerror]
    return texts[0].rpartition(": ")[2] if texts else str(error)


async def _connect(address: Address) -> trio.abc.Stream:
    if address.tls:
        return await trio.open_ssl_over_tcp_stream(address.host, address.port)
    return await trio.open_tcp_stream(address.host, address.port)


def _request_events(
    address: Address, method: str, path: str, json_body: Mapping[str, Any] | None
) -> list[h11.Request | h11.Data | h11.EndOfMessage]:
    headers = [
        ("host", address.netloc),
        ("user-agent", f"trio-llm/{__version__}"),
        ("accept", "application/json, text/event-stream"),
        ("connection", "close"),
    ]
    body = b"" if json_body is None else json.dumps(json_body).encode()
    if json_body is not None:
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    return [
        h11.Request(method=method, target=address.root + path, headers=headers),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ]


class _Wire:
    """h11's state machine and the stream under it."""

    def __init__(self, stream: trio.abc.Stream, address: Address) -> None:
        self._stream = stream
        self._address = address
        self._connection = h11.Connection(h11.CLIENT)

    async def send(self, events: list[h11.Request | h11.Data | h11.EndOfMessage]) -> None:
        data = b"".join(self._connection.send(event) or b"" for event in events)
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # A server that refuses a body early answers, then closes: its answer may still be read.
            return

    async def receive_head(self) -> h11.Response:
        event = await self.receive()
        while isinstance(event, h11.InformationalResponse):
            event = await self.receive()
        if not isinstance(event, h11.Response):
            raise self._broken()
        return event

    async def receive(self) -> object:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(bytes(await self._stream.receive_some(_CHUNK_BYTES)))
        except trio.BrokenResourceError:
            raise self._broken() from None
        except h11.RemoteProtocolError as error:
            if self._connection.trailing_data[1]:
                raise self._broken() from None
            raise ServerError(f"what answers at {self._address} does not speak HTTP ({error})") from None
        if isinstance(event, h11.ConnectionClosed):
            raise self._broken()
        return event

    def _broken(self) -> ServerUnreachableError:
        return ServerUnreachableError(f"the connection to {self._address} broke before the answer's end")
