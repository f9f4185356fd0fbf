"""EventStreamResponse: the outputs of one request as server-sent events.

A Starlette Response that speaks ASGI itself. Used by every streaming route.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio
from starlette.responses import Response

from trio_llm.frontend.http.answers.assembly import Event, Usage
from trio_llm.frontend.http.answers.generation import Generation, IndexedOutput
from trio_llm.frontend.http.server.shell import Receive, Scope, Send, reply_to
from trio_llm.frontend.http.server.sse import DONE_EVENT, EVENT_STREAM_HEADERS, KEEP_ALIVE, error_event

__all__ = ["FIRST_OUTPUT_S", "EventRenderer", "EventStreamResponse"]

FIRST_OUTPUT_S = 5.0
"""A stream without output for this long gets its 200 and a comment. Until then, an error has its own status."""


class EventRenderer(Protocol):
    """Writes events as a protocol has them."""

    def render(self, events: list[Event], usage: Usage) -> bytes:
        """Encode these events; `usage` counts up to the last of them."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """Encode the end of a complete stream."""
        ...


@dataclass(slots=True)
class _Start:
    """Sends `http.response.start` before the first body message."""

    send: Send
    headers: list[tuple[bytes, bytes]]
    is_sent: bool = False

    async def send_body(self, body: bytes) -> None:
        if not self.is_sent:
            self.is_sent = True
            await self.send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})


class EventStreamResponse(Response):
    """Generates while it is sent.

    Raises (when called): what the generation raises, until the response has started; later, an error event takes the
    place of the ending. Either way there is exactly one ending.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        renderer: EventRenderer,
        *,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM_HEADERS, **(headers or {})})
        self._generation = generation
        self._renderer = renderer
        self._keep_alive_s = keep_alive_s
        self._assembler = generation.assembler()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancellation: the generation is aborted and nothing more is sent."""
        start = _Start(send, self.raw_headers)
        try:
            async with self._generation.open() as outputs:
                await self._pump(outputs, start)
            self._assembler.check_finished()
            ending = self._renderer.ending(self._assembler.usage)
        except (Exception, BaseExceptionGroup) as error:
            if not start.is_sent:
                raise
            ending = error_event(reply_to(error, self._generation.request_id)) + DONE_EVENT
        # The shell holds the last message back until a disconnect cannot cancel it.
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _pump(self, outputs: AsyncIterator[IndexedOutput], start: _Start) -> None:
        """Write all outputs, and comments where they leave gaps.

        Raises:
            RequestTimeoutError: the request's time is over.
        """
        unsent: IndexedOutput | None = None
        timeout = self._generation.timeout
        gap_s = FIRST_OUTPUT_S
        while True:
            if unsent is not None:
                if body := self._render(unsent):
                    await start.send_body(body)
                unsent = None
            # One scope for all outputs, whose deadline each output moves: a scope per output would cost as much as
            # the rest. Taking an output is safe to cancel; while one is sent, the deadline is infinite.
            with trio.CancelScope(deadline=min(trio.current_time() + gap_s, timeout.deadline)) as quiet:
                async for output in outputs:
                    if quiet.cancel_called:  # the deadline passed in the very turn that brought the output
                        unsent = output
                        break
                    if body := self._render(output):
                        quiet.deadline = math.inf
                        await start.send_body(body)
                        now_s = trio.current_time()
                        if now_s >= timeout.deadline and not output[1].finished:
                            raise timeout.error()
                        quiet.deadline = min(now_s + self._keep_alive_s, timeout.deadline)
                else:
                    return
            if unsent is None:
                timeout.check(trio.current_time())
                await start.send_body(KEEP_ALIVE)
            gap_s = self._keep_alive_s

    def _render(self, output: IndexedOutput) -> bytes:
        events = self._assembler.feed(*output)
        return self._renderer.render(events, self._assembler.usage) if events else b""
