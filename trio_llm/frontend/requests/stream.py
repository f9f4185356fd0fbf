"""RequestStream: one request as a block of code, and GenerateStream, which `AsyncLLM.generate()` returns.

An object and not an async generator: a cancel scope or nursery held across a `yield` corrupts Trio's scope stack, and a
generator that is dropped runs its clean-up whenever the garbage collector likes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol

import trio

from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.outputs import RequestOutput

__all__ = ["GenerateStream", "RequestStream", "seconds_left"]

_Stage = Literal["new", "entering", "open", "over", "closed"]


class RequestStream(Protocol):
    """What `generate()` returns: an async context manager that is an async iterator inside.

    Entering admits the request; overload and bad input raise there. Leaving, by any way, aborts what is unfinished.
    """

    @property
    def request_id(self) -> str:
        """The caller's id of the request, or the one made for the caller."""
        ...

    async def __aenter__(self) -> RequestStream: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None: ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...


class GenerateStream:
    """Entering admits the request, leaving it aborts what is unfinished. Implements `RequestStream`.

    Args:
        request_id: the caller's id.
        admit: checks and sends the request; raises if it is refused, leaving nothing behind.
        leave: ends the request in the engine, unless it is over. Synchronous.
        resubmit: sends the request again that the engine dropped when its deadline had passed. Synchronous.
    """

    def __init__(
        self,
        request_id: str,
        admit: Callable[[], Awaitable[InFlightRequest]],
        leave: Callable[[InFlightRequest], None],
        resubmit: Callable[[InFlightRequest, float | None], None],
    ) -> None:
        self._request_id = request_id
        self._admit = admit
        self._leave = leave
        self._resubmit = resubmit
        self._stage: _Stage = "new"
        self._is_being_read = False
        self._request: InFlightRequest | None = None
        self._trio: trio.lowlevel.TrioToken | None = None
        """The Trio run that the block was entered in."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._request_id!r}: {self._stage}>"

    @property
    def request_id(self) -> str:
        """The caller's id of the request, or the one made for the caller."""
        return self._request_id

    async def __aenter__(self) -> GenerateStream:
        """Check and send the request, with the deadline of the cancel scopes around the caller.

        Cancellation: safe. If this raises, nothing was sent and nothing is registered; it may be tried again.

        Raises:
            InvalidRequestError: the request can never work.
            OverloadedError: the limits of this front end are reached.
            EngineUnavailableError: the engine is loading, draining or asleep.
            EngineDeadError: the engine is gone.
        """
        if self._stage != "new":
            raise RuntimeError("a stream can be entered once; call generate() again")
        self._stage = "entering"
        try:
            self._request = await self._admit()
            self._stage = "open"
        finally:
            if self._stage == "entering":
                self._stage = "new"
        self._trio = trio.lowlevel.current_trio_token()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abort the request unless it is over. Never waits, so that it works in a cancelled task."""
        assert self._request is not None
        self._leave(self._request)
        self._stage = "closed"

    def __del__(self) -> None:
        # A safety net, not a way to end a stream: when it runs, and in which thread, is up to the garbage collector.
        if self._stage in ("open", "over") and self._request is not None and self._trio is not None:
            with suppress(trio.RunFinishedError):
                self._trio.run_sync_soon(self._leave, self._request)
            warnings.warn(f"{self!r} was dropped without leaving its block", ResourceWarning, source=self, stacklevel=1)

    def __aiter__(self) -> GenerateStream:
        if self._stage == "new":
            raise RuntimeError(
                "a stream is a block: `async with llm.generate(...) as stream:` and then `async for output in stream:`"
            )
        return self

    async def __anext__(self) -> RequestOutput:
        """All that is new since the last time, as the request's `output_kind` says.

        The engine drops a request whose deadline passes before it begins. If the reader reads on all the same, its
        deadline was moved, and the request is sent again with the new one.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken; iterating may go on.

        Raises:
            EngineGenerateError: this request failed, and all text it is owed was taken.
            EngineDeadError: the engine is gone, and all text this request is owed was taken.
            trio.BusyResourceError: another task is reading this stream, which goes on undisturbed.
            trio.ClosedResourceError: another task has left the block meanwhile.
        """
        if self._stage == "over":
            raise StopAsyncIteration
        if self._stage != "open" or self._request is None:
            raise RuntimeError(f"{self!r} cannot be read outside its block")
        if self._is_being_read:
            raise trio.BusyResourceError(f"another task is reading {self!r}")
        self._is_being_read = True
        collector = self._request.collector
        try:
            while True:
                if collector.must_resubmit:
                    await self._send_again(self._request)
                # As `collector.receive`, but without a coroutine of its own for each token.
                if collector.is_unread:
                    output = await collector.receive()
                else:
                    output = collector.unpack(await collector.channel.receive())
                if output.outputs:
                    break  # else it only wakes the reader, since the engine has dropped the request
        except Exception as error:
            self._end()
            if isinstance(error, trio.EndOfChannel):
                collector.raise_error()
            raise
        finally:
            self._is_being_read = False
        if output.finished:
            self._end()
        return output

    def _end(self) -> None:
        if self._stage == "open":  # and not closed meanwhile
            self._stage = "over"

    async def _send_again(self, request: InFlightRequest) -> None:
        await trio.lowlevel.checkpoint()  # a reader that is out of time leaves here, and nothing is computed for it
        self._resubmit(request, seconds_left())


def seconds_left() -> float | None:
    """What the cancel scopes around the caller leave it, 0 if nothing; None: they have no deadline.

    An engine gets seconds and no time of day, since clocks do not cross processes.
    """
    deadline = trio.current_effective_deadline()
    return None if deadline == math.inf else max(0.0, deadline - trio.current_time())
