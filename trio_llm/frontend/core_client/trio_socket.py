"""TrioSocket: one zmq socket driven by Trio, for any number of tasks. Used by the core clients.

zmq gives each socket one descriptor (`FD`) that becomes readable when something *may* have changed, in either
direction, and every operation on the socket, a look at its `EVENTS` too, may take that signal back. Hence three rules,
which `tests/frontend/core_client/test_trio_socket.py` puts under load and takes apart look by look:

* wait only after `EVENTS` said "not ready", with no checkpoint and no other look between the two;
* one task, the leader, waits on the descriptor; the others are parked, and a leader that goes passes the lead on;
* after every operation look at `EVENTS` again, and whoever looks, for whatever reason, wakes all for whom it is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio
import zmq
from trio.lowlevel import ParkingLot

__all__ = ["TrioSocket"]

_T = TypeVar("_T")
_DIRECTIONS: Final = (zmq.PollEvent.POLLIN, zmq.PollEvent.POLLOUT)
_UNREACHABLE_RETRY_S: Final = 0.01


class TrioSocket:
    """Wraps a `zmq.Socket`, which from then on belongs to this object and to the thread that made it.

    A message is never torn and never lost to cancellation: `trio.Cancelled` is raised only before the socket took or
    gave anything.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._parked = {direction: ParkingLot() for direction in _DIRECTIONS}
        self._leads_for: zmq.PollEvent | None = None
        """The direction the leader waits for; None: nobody waits on the descriptor."""

    async def send_multipart(self, parts: list[bytes]) -> None:
        """Send one message, waiting while the socket cannot take it.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was sent.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            zmq.ZMQError: as zmq says, EHOSTUNREACH for an unknown peer of a mandatory ROUTER among others.
        """
        await self._operate(zmq.PollEvent.POLLOUT, lambda: self._socket.send_multipart(parts, zmq.NOBLOCK))

    async def recv_multipart(self) -> list[bytes]:
        """Take one message, waiting for it.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            trio.ClosedResourceError: the socket was closed.
        """
        return await self._operate(zmq.PollEvent.POLLIN, lambda: self._socket.recv_multipart(zmq.NOBLOCK))

    async def recv_many(self, limit: int = 256) -> list[list[bytes]]:
        """Take all messages that are there, `limit` at most, waiting for the first.

        One schedule point for all of them. Cancellation and errors as `recv_multipart`.
        """
        return await self._operate(zmq.PollEvent.POLLIN, lambda: self._take(limit))

    def close(self) -> None:
        """Close the socket, dropping what is unsent. Waiting tasks get `trio.ClosedResourceError`. Idempotent."""
        if self._socket.closed:
            return
        # Before the descriptor's number can be given to somebody else.
        trio.lowlevel.notify_closing(self._fd)
        self._socket.close(linger=0)
        for lot in self._parked.values():
            lot.unpark_all()

    def _take(self, limit: int) -> list[list[bytes]]:
        messages = [self._socket.recv_multipart(zmq.NOBLOCK)]
        try:
            while len(messages) < limit:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages

    async def _operate(self, direction: zmq.PollEvent, operation: Callable[[], _T]) -> _T:
        await trio.lowlevel.checkpoint_if_cancelled()
        has_yielded = False
        while True:
            self._check_open()
            try:
                result = operation()
            except zmq.Again:
                has_yielded = True
                if not self._look() & direction:
                    await self._wait_until_ready(direction)
                elif direction is zmq.PollEvent.POLLOUT:
                    # A ROUTER is ready when any peer is, but this one's peer is not: nothing tells when it will be.
                    await trio.sleep(_UNREACHABLE_RETRY_S)
                else:
                    await trio.lowlevel.checkpoint()  # a message came between the two looks
                continue
            if self._leads_for is not None or any(self._parked.values()):
                self._look()
            if not has_yielded:
                await trio.lowlevel.cancel_shielded_checkpoint()
            return result

    async def _wait_until_ready(self, direction: zmq.PollEvent) -> None:
        while not self._look() & direction:
            if self._leads_for is not None:
                await self._parked[direction].park()
            else:
                await self._lead(direction)
            self._check_open()

    async def _lead(self, direction: zmq.PollEvent) -> None:
        """Wait on the descriptor once. Whoever is parked then looks again, and one of them leads on."""
        self._leads_for = direction
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            pass  # woken by `_look` or `close`; the caller looks again
        finally:
            self._leads_for = None
            for lot in self._parked.values():
                lot.unpark_all()

    def _look(self) -> int:
        """What the socket is ready for: zmq.PollEvent flags.

        Whoever waits for one of them is woken: this look may have taken the signal that was to do it. One look for both
        directions: a second one could take the signal of what came between.
        """
        events: int = self._socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
        for direction in _DIRECTIONS:
            if events & direction:
                if self._leads_for == direction:
                    trio.lowlevel.notify_closing(self._fd)
                self._parked[direction].unpark()
        return events

    def _check_open(self) -> None:
        if self._socket.closed:
            raise trio.ClosedResourceError("the socket was closed")
