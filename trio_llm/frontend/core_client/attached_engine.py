"""AttachedEngine: the core client for an engine that another process owns. It connects to sockets that are bound here.

Used by a front end under a supervisor, which says when an incarnation is lost, since it sees the process.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import trio
import zmq

from trio_llm.errors import CodecError, EngineDeadError
from trio_llm.frontend.core_client.base import EngineLost
from trio_llm.frontend.core_client.engine_sockets import EngineSockets
from trio_llm.frontend.core_client.outbox import Outbox
from trio_llm.wire.boot import engine_identity
from trio_llm.wire.codec import decode_from_engine
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["AttachedEngine"]

logger = logging.getLogger(__name__)

_TAIL_S: Final = 0.2
"""Seconds without a message of a lost incarnation, until its last message counts as taken."""


class AttachedEngine:
    """One engine over all its incarnations. Implements `CoreClient`.

    An incarnation that connects before the loss of the one before was announced waits: what it sends is kept in order.

    Args:
        engine_index: number of the engine among those of the supervisor, from 0.
        kill: asks the owner to end an incarnation, by its epoch and a reason.

    Raises:
        EngineStartupError: the sockets cannot be made.
    """

    def __init__(self, engine_index: int, kill: Callable[[int, str], None]) -> None:
        self._engine_index = engine_index
        self._kill = kill
        self.sockets = EngineSockets()
        self._outbox = Outbox()
        self._epoch = 0
        """The incarnation whose messages are taken; 0: none has been heard of, or the last one is lost."""
        self._is_garbled = False
        """A frame of this incarnation was malformed: what comes after it is dropped."""
        self._early: list[FromEngine] = []
        """Messages of the incarnations that follow."""
        self._losses: deque[EngineLost] = deque()
        """What was announced and not reported yet."""
        self._dead_error: EngineDeadError | None = None
        self._connected: set[bytes] = set()
        """Identities of the incarnations that the ROUTER can address."""
        self._num_lost = 0
        self._last_lost = 0
        """The epoch of the last incarnation whose loss was reported: nothing of it, or of one before, is taken."""
        self._changes = trio.lowlevel.ParkingLot()
        """Where the sender waits for its incarnation to connect."""

    # --------------------------------------------------------------------------- as a CoreClient

    async def run(self) -> None:
        """Send what is queued. Returns never. Cancellation: the sockets are closed; the engine goes on."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._note_connections)
                nursery.start_soon(self._send_outbox)
        finally:
            self.sockets.close()

    def send_nowait(self, message: ToEngine) -> None:
        self._outbox.append(message)

    async def receive(self) -> Sequence[FromEngine | EngineLost]:
        while True:
            if messages := self._take_early():
                return messages
            if self._must_end:
                if (end := await self._receive_end()) is not None:
                    return end
                continue
            frames = await self._receive_frames()
            if messages := self._decode(frames):
                return messages

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        """Ask the owner to end the incarnation, unless it is lost already. The owner decides whether one follows."""
        if self._epoch:
            self._kill(self._epoch, reason)

    # ------------------------------------------------------------------------ what the owner says

    def announce_loss(self, loss: EngineLost) -> None:
        """An incarnation is dead. `receive` reports it after what it had sent, unless a later one was heard of."""
        if loss.epoch < self._epoch:
            return
        self._losses.append(loss)
        self.sockets.from_engine.interrupt()

    def announce_death(self, error: EngineDeadError) -> None:
        """The last incarnation is dead. `receive` raises `error` after what it had sent."""
        if self._dead_error is None:
            self._dead_error = error
            self.sockets.from_engine.interrupt()

    # --------------------------------------------------------------------------------- receiving

    @property
    def _must_end(self) -> bool:
        """The present incarnation was announced as dead."""
        return bool(self._losses) or self._dead_error is not None

    async def _receive_frames(self) -> list[bytes]:
        try:
            return await self.sockets.from_engine.recv_frames()
        except trio.ClosedResourceError:
            raise EngineDeadError("the front end was stopped") from None

    async def _receive_end(self) -> Sequence[FromEngine | EngineLost] | None:
        """What the incarnation that was announced as dead had sent; when there is nothing more, its end.

        Raises:
            EngineDeadError: it was the last one.
        """
        with trio.move_on_after(_TAIL_S):
            return self._decode(await self._receive_frames()) or None
        if not self._losses:
            assert self._dead_error is not None
            raise self._dead_error
        loss = self._losses.popleft()
        self._set_epoch(0)
        self._last_lost = loss.epoch
        self._num_lost += 1
        self._outbox.clear()
        return [loss]

    def _decode(self, frames: list[bytes]) -> list[FromEngine]:
        """The messages of the present incarnation. Those of later ones are kept, and of earlier ones dropped."""
        messages: list[FromEngine] = []
        for frame in frames:
            try:
                message = decode_from_engine(frame)
            except CodecError as error:
                # A token may be missing: no message that follows can be trusted.
                if self._epoch and not self._is_garbled:  # else it is of an incarnation that is lost
                    self._is_garbled = True
                    self._kill(self._epoch, f"the engine sent a {error}")
                continue
            if message.engine_index != self._engine_index or message.epoch < max(self._epoch, self._last_lost + 1):
                continue
            if self._epoch == 0 and not self._early and not self._must_end:
                self._set_epoch(message.epoch)
            if message.epoch != self._epoch:
                self._early.append(message)
            elif not self._is_garbled:
                messages.append(message)
        return messages

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._is_garbled = False
        self._changes.unpark_all()

    def _take_early(self) -> list[FromEngine]:
        """The messages that were kept of the next incarnation, once the one before it is lost."""
        if self._epoch != 0 or not self._early:
            return []
        epoch = min(message.epoch for message in self._early)
        if self._losses and self._losses[0].epoch < epoch:
            return []
        self._set_epoch(epoch)
        messages = [message for message in self._early if message.epoch == epoch]
        self._early = [message for message in self._early if message.epoch > epoch]
        return messages

    # ----------------------------------------------------------------------------------- sending

    async def _note_connections(self) -> None:
        """The first frame of each incarnation: from now on the ROUTER knows its identity."""
        while True:
            identity, *_ = await self.sockets.to_engine.recv_multipart()
            self._connected.add(identity)
            self._changes.unpark_all()

    async def _send_outbox(self) -> None:
        while True:
            frames = await self._outbox.take()
            num_lost = self._num_lost
            while (identity := engine_identity(self._engine_index, self._epoch)) not in self._connected:
                await self._changes.park()
            if num_lost == self._num_lost:  # else they were for an incarnation that is lost
                for frame in frames:
                    await self._send(identity, frame)

    async def _send(self, identity: bytes, frame: bytes) -> None:
        try:
            await self.sockets.to_engine.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            logger.debug("a message to engine %d was not sent: it is gone", self._engine_index)
