"""EngineLink: the engine's end of the wire, two zmq sockets. Used by the engine's one thread.

A malformed frame is dropped with a line on standard error: no message can end the engine.
"""

from __future__ import annotations

import sys
from typing import Final

import zmq

from trio_llm.errors import CodecError
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_to_engine, encode
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["EngineLink"]

_MAX_MESSAGES: Final = 2048
"""Messages per call of `receive`: more than one HTTP request makes, and few enough that a flood of requests does not
keep the engine from its next step."""
_LINGER_MS: Final = 2000
"""Time that closing may take to hand over the last message."""


class EngineLink:
    """A DEALER socket for messages from the front end, a PUSH socket for messages to it."""

    def __init__(self, boot: EngineBoot) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.DEALER)
        # Before connecting: the front end's ROUTER addresses the engine by it from the first frame on.
        self._input.setsockopt(zmq.IDENTITY, engine_identity(boot.engine_index, boot.epoch))
        self._output = self._context.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            # The credit bounds the messages in flight; a high-water mark would drop messages or block.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._input.connect(boot.input_address)
        self._output.connect(boot.output_address)
        # With this frame the ROUTER learns the identity and can address this engine.
        self._input.send(b"")

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Take the messages that have arrived, waiting up to `timeout_s` for the first one; 0 never waits."""
        if not self._input.poll(round(timeout_s * 1000)):
            return []
        messages: list[ToEngine] = []
        try:
            while len(messages) < _MAX_MESSAGES:
                frame = self._input.recv(zmq.NOBLOCK)
                try:
                    messages.append(decode_to_engine(frame))
                except CodecError as error:
                    print(f"dropped a malformed frame: {error}", file=sys.stderr)
        except zmq.Again:
            pass
        return messages

    def send(self, message: FromEngine) -> None:
        """Hand a message over for sending. Never blocks."""
        self._output.send(encode(message))

    def close(self) -> None:
        """Hand over what was sent, within two seconds, and close the sockets."""
        self._input.close()
        self._output.close()
        self._context.term()
