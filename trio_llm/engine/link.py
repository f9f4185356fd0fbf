"""EngineLink: the engine's end of the wire, two zmq sockets per client. Used by the engine's one thread.

A malformed frame is dropped with a line on standard error: no message can end the engine.
"""

from __future__ import annotations

import sys
from typing import Final

import zmq

from trio_llm.errors import CodecError
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_to_engine, encode
from trio_llm.wire.messages import AttachClient, FromEngine, ToEngine

__all__ = ["EngineLink"]

_MAX_MESSAGES: Final = 2048
"""Messages per client and call of `receive`: more than one HTTP request makes, and few enough that a flood of requests
does not keep the engine from its next step."""
_LINGER_MS: Final = 2000
"""Time that closing may take to hand over the last message."""
_OWNER: Final = 0


class _ClientSockets:
    """A DEALER socket for messages from one client, a PUSH socket for messages to it.

    Raises:
        zmq.ZMQError: an address is none. Nothing is left open.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: EngineBoot | AttachClient, identity: bytes
    ) -> None:
        self.input = context.socket(zmq.DEALER)
        # Before connecting: the client's ROUTER addresses the engine by it from the first frame on.
        self.input.setsockopt(zmq.IDENTITY, identity)
        self.output = context.socket(zmq.PUSH)
        for socket in (self.input, self.output):
            # The credit bounds the messages in flight; a high-water mark would drop messages or block.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self.input.connect(addresses.input_address)
            self.output.connect(addresses.output_address)
        except zmq.ZMQError:
            self.close(linger_ms=0)
            raise
        # With this frame the ROUTER learns the identity and can address this engine.
        self.input.send(b"")

    def close(self, *, linger_ms: int = _LINGER_MS) -> None:
        self.input.close(linger_ms)
        self.output.close(linger_ms)


class EngineLink:
    """The sockets to all clients. Implements `Link`."""

    def __init__(self, boot: EngineBoot) -> None:
        self._context = zmq.Context()
        self._identity = engine_identity(boot.engine_index)
        self._clients: dict[int, _ClientSockets] = {}
        self._poller = zmq.Poller()
        self._indexes: dict[zmq.Socket[bytes], int] = {}
        """By input socket: the client."""
        self._open(_OWNER, boot)

    def receive(self, timeout_s: float) -> list[tuple[int, ToEngine]]:
        """Take the messages that have arrived, waiting up to `timeout_s` for the first one; 0 never waits.

        Those of client 0 come last.
        """
        messages: list[tuple[int, ToEngine]] = []
        ready = [self._indexes[socket] for socket, _ in self._poller.poll(round(timeout_s * 1000))]
        for client_index in sorted(ready, reverse=True):
            self._receive_from(client_index, messages)
        return messages

    def _receive_from(self, client_index: int, messages: list[tuple[int, ToEngine]]) -> None:
        socket = self._clients[client_index].input
        try:
            for _ in range(_MAX_MESSAGES):
                frame = socket.recv(zmq.NOBLOCK)
                try:
                    messages.append((client_index, decode_to_engine(frame)))
                except CodecError as error:
                    print(f"dropped a malformed frame: {error}", file=sys.stderr)
        except zmq.Again:
            pass

    def send(self, client_index: int, message: FromEngine) -> None:
        """Hand a message over for sending. Never blocks. Dropped if the client has no sockets; see `attach`."""
        if client_index in self._clients:
            self._clients[client_index].output.send(encode(message))

    def send_to_all(self, message: FromEngine) -> None:
        """`send` to every client."""
        for client_index in self._clients:
            self.send(client_index, message)

    def attach(self, client: AttachClient) -> None:
        """Connect to a client. If its addresses are none, a line on standard error says so, and it has no sockets."""
        self.detach(client.client_index)
        try:
            self._open(client.client_index, client)
        except zmq.ZMQError as error:
            print(f"cannot connect to client {client.client_index}: {error}", file=sys.stderr)

    def detach(self, client_index: int) -> None:
        """Close the sockets of a client, if it has some, and drop what is on its way in them."""
        if sockets := self._clients.pop(client_index, None):
            self._poller.unregister(sockets.input)
            del self._indexes[sockets.input]
            sockets.close(linger_ms=0)

    def _open(self, client_index: int, addresses: EngineBoot | AttachClient) -> None:
        sockets = self._clients[client_index] = _ClientSockets(self._context, addresses, self._identity)
        self._poller.register(sockets.input, zmq.POLLIN)
        self._indexes[sockets.input] = client_index

    def close(self) -> None:
        """Hand over what was sent, within two seconds, and close the sockets."""
        for sockets in self._clients.values():
            sockets.close()
        self._context.term()
