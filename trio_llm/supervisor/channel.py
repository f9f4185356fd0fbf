"""Channel: messages between the supervisor and one front end, over a socket pair. Both ends use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from trio_llm.errors import CodecError
from trio_llm.supervisor.messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, FromFrontEnd, ToFrontEnd, encode

__all__ = ["Channel"]

_In = TypeVar("_In")


class Channel(Generic[_In]):
    """One end.

    Args:
        stream: this end's socket, which belongs to the channel from now on.
        decode: makes a message of its bytes; raises CodecError.
    """

    def __init__(self, stream: trio.abc.Stream, decode: Callable[[bytes], _In]) -> None:
        self._stream = stream
        self._decode = decode
        self._unsent: list[bytes] = []
        self._has_unsent = trio.Event()
        self._received = bytearray()

    def send_nowait(self, message: ToFrontEnd | FromFrontEnd) -> None:
        """Queue one message. Synchronous. If the other end is gone it goes nowhere.

        Raises:
            CodecError: it has no form as bytes. Nothing was queued.
        """
        self._unsent.append(encode(message))
        self._has_unsent.set()

    async def run(self) -> None:
        """Send what is queued, until the other end is gone. Cancellation: a message may be cut off."""
        try:
            while True:
                await self._has_unsent.wait()
                self._has_unsent = trio.Event()
                unsent, self._unsent = self._unsent, []
                await self._stream.send_all(b"".join(unsent))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # `receive` gives None

    async def receive(self) -> _In | None:
        """The next message; None when the other end is gone.

        Cancellation: safe; nothing was taken.

        Raises:
            CodecError: what came is no message. The channel is of no use then.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            size = int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if size > MAX_MESSAGE_BYTES:
                raise CodecError(f"a message of {size} bytes is longer than the limit of {MAX_MESSAGE_BYTES}")
            end = LENGTH_BYTES + size
            if len(self._received) >= max(end, LENGTH_BYTES + 1):
                document = bytes(self._received[LENGTH_BYTES:end])
                del self._received[:end]
                return self._decode(document)
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._received += data

    async def aclose(self) -> None:
        """Close this end. The other one sees it at once. Cancellation: it is closed all the same."""
        await self._stream.aclose()
