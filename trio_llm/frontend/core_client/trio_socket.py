"""TrioSocket: one zmq socket driven by Trio, for any number of tasks. Used by the core clients.

zmq gives each socket one descriptor (`FD`) that becomes readable when something *may* have changed, in either
direction, and every operation on the socket, a look at its `EVENTS` too, may take that signal back. Hence three rules,
which `tests/frontend/core_client/test_trio_socket.py` puts under load and takes apart look by look:

* wait only after `EVENTS` said "not ready", with no checkpoint and no other look between the two;
* one task, the leader, waits on the descriptor; the others are parked, and a leader that goes passes the lead on;
* after every operation look at `EVENTS` again. Each look, for whatever reason, wakes all tasks for which it is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio
import zmq
from trio.lowlevel import ParkingLot

__all__ = ["TrioSocket"]

_T = TypeVar("_T")

# Plain integers: an operation on members of an enum costs more than the zmq call beside it.
_IN: Final = int(zmq.POLLIN)
_OUT: Final = int(zmq.POLLOUT)
_EVENTS: Final = int(zmq.EVENTS)
_NOBLOCK: Final = int(zmq.NOBLOCK)

_UNREACHABLE_RETRY_S: Final = 0.01


class TrioSocket:
    """Wraps a `zmq.Socket`, which from then on belongs to this object and to the thread that made it.

    A message is never torn and never lost to cancellation: `trio.Cancelled` is raised only before the socket took or
    gave anything.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._parked = {_IN: ParkingLot(), _OUT: ParkingLot()}
        self._num_waiting = 0
        """Tasks that lead or are parked. While there are none, a look has no task to wake."""
        self._leads_for: int | None = None
        """The direction the leader waits for; None: no task waits on the descriptor."""
        self._num_interrupts = 0

    async def send_multipart(self, parts: list[bytes]) -> None:
        """Send one message, waiting while the socket cannot take it.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was sent.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            zmq.ZMQError: as zmq says, EHOSTUNREACH for an unknown peer of a mandatory ROUTER among others.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        has_yielded = False
        while True:
            self._check_open()
            try:
                self._socket.send_multipart(parts, _NOBLOCK)
            except zmq.Again:
                has_yielded = True
                if self._look() & _OUT:
                    # A ROUTER is ready when any peer is, but this one's peer is not: no signal comes when it is.
                    await trio.sleep(_UNREACHABLE_RETRY_S)
                else:
                    await self._wait(_OUT)
                continue
            break
        if self._num_waiting:
            self._look()
        if not has_yielded:
            await trio.lowlevel.cancel_shielded_checkpoint()

    async def recv_multipart(self) -> list[bytes]:
        """Take one message, waiting for it.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            trio.ClosedResourceError: the socket was closed.
        """
        messages: list[list[bytes]] = []
        while not messages:  # interrupts are for `recv_frames`
            messages = await self._receive(lambda: self._socket.recv_multipart(_NOBLOCK), 1)
        return messages[0]

    async def recv_frames(self, limit: int = 256) -> list[bytes]:
        """Take all frames that are there, `limit` at most, waiting for the first. For messages of one frame each.

        One schedule point for all of them. Cancellation and errors as `recv_multipart`.

        Returns:
            At least one; none if `interrupt` was called meanwhile.
        """
        return await self._receive(lambda: self._socket.recv(_NOBLOCK), limit)

    def interrupt(self) -> None:
        """Let `recv_frames` return with what there is, in all tasks that wait in it now. Synchronous."""
        self._num_interrupts += 1
        if self._leads_for is not None:
            trio.lowlevel.notify_closing(self._fd)
        self._parked[_IN].unpark_all()

    def close(self) -> None:
        """Close the socket, dropping what is unsent. Waiting tasks get `trio.ClosedResourceError`. Idempotent."""
        if self._socket.closed:
            return
        # Before another descriptor can get the same number.
        trio.lowlevel.notify_closing(self._fd)
        self._socket.close(linger=0)
        for lot in self._parked.values():
            lot.unpark_all()

    async def _receive(self, take: Callable[[], _T], limit: int) -> list[_T]:
        await trio.lowlevel.checkpoint_if_cancelled()
        has_yielded = False
        num_interrupts = self._num_interrupts
        while True:
            self._check_open()
            taken: list[_T] = []
            # The last look of this loop is the one that rules 1 and 3 ask for.
            while self._look() & _IN and len(taken) < limit:
                taken.append(take())
            if taken or num_interrupts != self._num_interrupts:
                break
            has_yielded = True
            await self._wait(_IN)
        if not has_yielded:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return taken

    async def _wait(self, direction: int) -> None:
        """Wait once; the caller looks again. To be called right after a look that was not ready for `direction`."""
        self._num_waiting += 1
        try:
            if self._leads_for is not None:
                await self._parked[direction].park()
            else:
                await self._lead(direction)
        finally:
            self._num_waiting -= 1

    async def _lead(self, direction: int) -> None:
        """Wait on the descriptor once. Parked tasks then look again, and one of them leads on."""
        self._leads_for = direction
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            pass  # woken by `_look`, `interrupt` or `close`; the caller looks again
        finally:
            self._leads_for = None
            if self._num_waiting > 1:
                for lot in self._parked.values():
                    lot.unpark_all()

    def _look(self) -> int:
        """What the socket is ready for: POLLIN and POLLOUT as flags.

        Tasks that wait for one of them are woken: this look may have taken the signal that was to do it. One look for
        both directions: a second one could take the signal of what came between.
        """
        events: int = self._socket.getsockopt(_EVENTS)  # type: ignore[assignment]
        if self._num_waiting:
            for direction, lot in self._parked.items():
                if events & direction:
                    if self._leads_for == direction:
                        trio.lowlevel.notify_closing(self._fd)
                    lot.unpark()
        return events

    def _check_open(self) -> None:
        if self._socket.closed:
            raise trio.ClosedResourceError("the socket was closed")
