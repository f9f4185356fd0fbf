"""EngineLink: the engine's end of the wire, two zmq sockets. Used by the engine's one thread.

A malformed frame is dropped with a line on standard error; nothing that arrives can end the engine.
"""

from __future__ import annotations

import sys

import zmq

from trio_llm.errors import CodecError
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_to_engine, encode
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["EngineLink"]

_MAX_MESSAGES = 256
"""Taken in one go: a flood of requests must not keep the engine from its step."""
_LINGER_MS = 2000
"""How long closing may take to hand over the last message."""


class EngineLink:
    """DEALER for what comes in, PUSH for what goes out."""

    def __init__(self, boot: EngineBoot) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.DEALER)
        # Before connecting: the front end's ROUTER knows the engine by it from the first frame on.
        self._input.setsockopt(zmq.IDENTITY, engine_identity(boot.engine_index))
        self._output = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            # The credit bounds what is under way; a high-water mark would drop or block.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._input.connect(boot.input_address)
        self._output.connect(boot.output_address)
        # Tells the ROUTER that the identity is there: it can address this engine from now on.
        self._input.send(b"")

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Take what has arrived, waiting up to `timeout_s` for the first message; 0 never waits."""
        if not self._input.poll(round(timeout_s * 1000)):
            return []
        messages: list[ToEngine] = []
        try:
            while len(messages) < _MAX_MESSAGES:
                frame = self._input.recv(zmq.NOBLOCK)
                try:
                    messages.append(decode_to_engine(frame))
                except CodecError as error:
                    print(f"dropped a frame: {error}", file=sys.stderr)
        except zmq.Again:
            pass
        return messages

    def send(self, message: FromEngine) -> None:
        """Hand a message over for sending. Never blocks."""
        self._output.send(encode(message))

    def close(self) -> None:
        """Hand over what was sent, within two seconds, and let go of everything."""
        self._input.close()
        self._output.close()
        self._context.term()
