"""OneEngineClient: the core client for one engine process on this machine. Starts the engine and watches it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Final

import trio
import zmq

from trio_llm.config import EngineConfig
from trio_llm.errors import CodecError, EngineDeadError, EngineStartupError
from trio_llm.frontend.core_client.engine_process import ENGINE_COMMAND, EngineProcess
from trio_llm.frontend.core_client.engine_sockets import EngineSockets
from trio_llm.frontend.core_client.outbox import Outbox
from trio_llm.wire.boot import EngineBoot, engine_identity
from trio_llm.wire.codec import decode_from_engine
from trio_llm.wire.messages import EngineDead, FromEngine, ToEngine

__all__ = ["OneEngineClient"]

logger = logging.getLogger(__name__)

_TAIL_S: Final = 0.2
"""Seconds without a message after the engine's end, until its last message counts as taken."""
_LAST_WORDS_S: Final = 2.0
"""Seconds from the message that the engine failed until it is killed: a device that hangs may keep it from ending."""
_STOP_GRACE_S: Final = 2.0
"""How long an engine that was ordered to stop may take until it is killed."""


class OneEngineClient:
    """One engine: its process, its sockets and the outbox. Implements `CoreClient`.

    Args:
        config: what the engine runs.
        epoch: count of this incarnation of the engine, from 1. It is not started again: see `RestartingClient`.
        engine_index: number of the engine among those of this front end, from 0.
        command: the program that is the engine, and its arguments.

    Raises:
        EngineStartupError: the sockets cannot be made.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: int = 1,
        *,
        engine_index: int = 0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._command = command
        self._epoch = epoch
        self._engine_index = engine_index
        self._outbox = Outbox()
        self._sockets = EngineSockets()
        self._has_input_peer = trio.Event()
        self._has_output_peer = trio.Event()
        self._is_exited = False
        self._is_garbled = False
        """A frame was malformed: what comes after it is dropped."""
        self._last_words: str | None = None
        self._has_last_words = trio.Event()
        self._kill_reason: str | None = None
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, once it is started."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """As `CoreClient.run`.

        Raises:
            EngineStartupError: the process cannot be started.
        """
        boot = EngineBoot(
            config=self._config,
            engine_index=self._engine_index,
            epoch=self._epoch,
            input_address=self._sockets.input_address,
            output_address=self._sockets.output_address,
        )
        try:
            try:
                process = self._process = EngineProcess(boot, command=self._command)
            except (OSError, CodecError) as error:
                self._kill_reason = f"cannot start the engine process: {error}"
                raise EngineStartupError(self._kill_reason) from error
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(process.relay_output)
                    nursery.start_soon(self._send_outbox)
                    nursery.start_soon(self._remove_folder_when_connected)
                    nursery.start_soon(self._kill_after_last_words)
                    await process.wait_exit()
                    self._is_exited = True
                    self._sockets.from_engine.interrupt()
                    # The tasks still run: what the engine printed last is still in the pipe.
            finally:
                await process.stop(grace_s=_STOP_GRACE_S)
        finally:
            self._sockets.close()

    def send_nowait(self, message: ToEngine) -> None:
        self._outbox.append(message)

    async def receive(self) -> list[FromEngine]:
        while True:
            try:
                frames = await (self._receive_tail() if self._is_exited else self._sockets.from_engine.recv_frames())
            except trio.ClosedResourceError:
                raise EngineDeadError(self._kill_reason or "the engine was stopped") from None
            if messages := self._decode(frames):
                return messages

    def kill(self, reason: str, *, for_good: bool = False) -> None:
        if self._kill_reason is None:
            self._kill_reason = reason
        if self._process is not None:
            self._process.kill()

    async def _receive_tail(self) -> list[bytes]:
        """The messages that the engine sent before it ended.

        Raises:
            EngineDeadError: all of it was taken.
        """
        with trio.move_on_after(_TAIL_S):
            return await self._sockets.from_engine.recv_frames()
        assert self._process is not None
        raise EngineDeadError(self._kill_reason or self._last_words or self._process.exit_description)

    def _decode(self, frames: list[bytes]) -> list[FromEngine]:
        """The messages of this incarnation; those of others are dropped."""
        messages: list[FromEngine] = []
        if frames and not self._has_output_peer.is_set():
            self._has_output_peer.set()
        for frame in frames:
            if self._is_garbled:
                break
            try:
                message = decode_from_engine(frame)
            except CodecError as error:
                # A token may be missing: no message that follows can be trusted.
                self._is_garbled = True
                self.kill(f"the engine sent a {error}")
                break
            if message.epoch != self._epoch or message.engine_index != self._engine_index:
                continue
            if isinstance(message, EngineDead):
                self._last_words = message.reason
                self._has_last_words.set()
            messages.append(message)
        return messages

    async def _kill_after_last_words(self) -> None:
        await self._has_last_words.wait()
        await trio.sleep(_LAST_WORDS_S)
        assert self._process is not None
        self._process.kill()

    async def _remove_folder_when_connected(self) -> None:
        await self._has_input_peer.wait()
        await self._has_output_peer.wait()
        self._sockets.remove_folder()

    async def _send_outbox(self) -> None:
        # The engine's first frame: from now on the ROUTER knows its identity.
        await self._sockets.to_engine.recv_multipart()
        self._has_input_peer.set()
        identity = engine_identity(self._engine_index, self._epoch)
        while True:
            for frame in await self._outbox.take():
                try:
                    await self._sockets.to_engine.send_multipart([identity, frame])
                except zmq.ZMQError as error:
                    if error.errno != errno.EHOSTUNREACH:
                        raise
                    # It is gone; `wait_exit` notices.
                    logger.debug("a message to the engine was not sent: it is gone")
