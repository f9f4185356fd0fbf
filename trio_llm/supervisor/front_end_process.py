"""FrontEndProcess: one front end over all its incarnations, as the supervisor sees it: run, heard, run again."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import trio

from trio_llm.errors import CodecError
from trio_llm.frontend.core_client.child_process import ChildProcess
from trio_llm.supervisor.channel import Channel
from trio_llm.supervisor.messages import (
    Boot,
    EngineAddresses,
    FromFrontEnd,
    KillEngine,
    Listening,
    Serving,
    Stop,
    ToFrontEnd,
    decode_from_front_end,
)

__all__ = ["FRONT_END_COMMAND", "FrontEndProcess"]

logger = logging.getLogger(__name__)

FRONT_END_COMMAND: Final = (sys.executable, "-P", "-m", "trio_llm.supervisor.front_end")

_STOP_GRACE_S: Final = 2.0
"""How long a front end may take to end once its channel is closed, until it is killed."""


class FrontEndProcess:
    """Runs one incarnation at a time.

    Args:
        boot: what each incarnation gets first.
        handle: gets the messages that are not about this object's own state, with the index of the front end.
        command: the program that is the front end, and its arguments; the descriptor of its channel follows them.
    """

    def __init__(
        self,
        boot: Boot,
        handle: Callable[[int, FromFrontEnd], None],
        *,
        command: Sequence[str] = FRONT_END_COMMAND,
    ) -> None:
        self._boot = boot
        self._handle = handle
        self._command = command
        self.index = boot.client_index
        self.epoch = 0
        """Count of its incarnations."""
        self.pid: int | None = None
        self.addresses: Sequence[EngineAddresses] = ()
        """Where the present incarnation listens for the engines; empty: it does not yet."""
        self.is_serving = trio.Event()
        """It has answered clients. Stays set when a later incarnation is started."""
        self._channel: Channel[FromFrontEnd] | None = None

    def send_nowait(self, message: ToFrontEnd) -> None:
        """Queue one message for the present incarnation, if there is one. Synchronous."""
        if self._channel is not None:
            self._channel.send_nowait(message)

    def order_stop(self) -> None:
        """Let it drain and end."""
        self.send_nowait(Stop())

    async def run(self, greet: Callable[[], None]) -> str:
        """Run one incarnation to its end, and say how it ended.

        Args:
            greet: called when the incarnation can be sent messages: it is to learn what has happened before.

        Cancellation: the process is ended before this returns, within a few seconds.

        Raises:
            OSError: it cannot be started.
        """
        self.epoch += 1
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [*self._command, str(theirs.fileno())]
                pass_fds = [theirs.fileno(), self._boot.load_fd, *self._boot.listener_fds]
                process = ChildProcess(command, f"front end {self.index}", pass_fds=pass_fds)
        except OSError:
            ours.close()
            raise
        self.pid = process.pid
        ours.setblocking(False)
        channel = self._channel = Channel(
            trio.SocketStream(trio.socket.from_stdlib_socket(ours)), decode_from_front_end
        )
        try:
            channel.send_nowait(msgspec.structs.replace(self._boot, is_restarted=self.epoch > 1))
            greet()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run)
                nursery.start_soon(self._listen, channel, process)
                async with trio.open_nursery() as relaying:
                    relaying.start_soon(process.relay_output)
                    await process.wait_exit()
                    # What it printed last is still in the pipe, which a child of its own might keep open.
                    relaying.cancel_scope.deadline = trio.current_time() + _STOP_GRACE_S
                nursery.cancel_scope.cancel(reason="the front end has ended")
        finally:
            self._channel, self.addresses, self.pid = None, (), None
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2 * _STOP_GRACE_S):
                await channel.aclose()
                await process.stop(grace_s=_STOP_GRACE_S)
        return process.exit_description

    async def _listen(self, channel: Channel[FromFrontEnd], process: ChildProcess) -> None:
        try:
            while (message := await channel.receive()) is not None:
                match message:
                    case Listening():
                        if len(message.addresses) != self._boot.num_engines:
                            raise CodecError("message with addresses for another number of engines")
                        self.addresses = message.addresses
                    case KillEngine(engine_index=index) if not 0 <= index < self._boot.num_engines:
                        raise CodecError("message about an engine that there is not")
                    case Serving():
                        self.is_serving.set()
                self._handle(self.index, message)
        except CodecError as error:
            logger.error("front end %d is ended: it sent a %s", self.index, error)
            process.kill()
