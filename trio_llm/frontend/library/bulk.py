"""open_map: one answer for each of many prompts, a bounded number at a time.

The tasks live in a nursery of the block. Used by `LibraryCalls.map`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, cast

import trio

from trio_llm.frontend.exception_groups import errors_to, unwrap_single
from trio_llm.outputs import RequestOutput

__all__ = ["MapResults", "Prompts", "open_map"]

logger = logging.getLogger(__name__)

Prompt = str | list[int]
Prompts = Iterable[Prompt] | AsyncIterable[Prompt]

_END: Final = object()


class MapResults:
    """What `llm.map()` gives: an async iterator of answers. Several tasks may read it; each answer goes to one."""

    def __init__(
        self,
        receive: trio.MemoryReceiveChannel[RequestOutput | Exception],
        slots: trio.Semaphore,
        stop: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._slots = slots
        self._stop = stop
        self._has_failed = False

    def __aiter__(self) -> MapResults:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next answer.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            TrioLLMError: a prompt failed; the iteration is over, and what runs is aborted. Errors of the prompts'
                iterable come here, too.
            trio.ClosedResourceError: the block was left.
        """
        if self._has_failed:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        try:
            result = await self._receive.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        self._slots.release()
        if isinstance(result, Exception):
            self._has_failed = True
            self._stop()
            raise result
        return result


class _Mapping:
    """The feeding side: takes prompts while there are slots, and passes answers on in order."""

    def __init__(
        self,
        answer: Callable[[Prompt], Awaitable[RequestOutput]],
        send: trio.MemorySendChannel[RequestOutput | Exception],
        slots: trio.Semaphore,
        *,
        ordered: bool,
    ) -> None:
        self._answer = answer
        self._send = send
        self._slots = slots
        self._is_ordered = ordered
        self._held_back: dict[int, RequestOutput | Exception] = {}
        """Results whose predecessors are unfinished, by the prompt's number."""
        self._num_sent = 0
        self._feeding = trio.CancelScope()
        self._running = trio.CancelScope()

    async def run(self, prompts: Prompts) -> None:
        with self._send, self._running:
            async with trio.open_nursery() as nursery:
                await self._feed(prompts, nursery)

    def stop(self) -> None:
        """Abort what runs, and begin nothing more. Synchronous."""
        self._running.cancel()

    async def _feed(self, prompts: Prompts, nursery: trio.Nursery) -> None:
        with errors_to(_log_clean_up):
            try:
                with self._feeding:
                    await self._take_all(prompts, nursery)
            finally:
                if isinstance(prompts, AsyncGenerator):
                    await prompts.aclose()

    async def _take_all(self, prompts: Prompts, nursery: trio.Nursery) -> None:
        take: Callable[[], Awaitable[object]] | None = None
        number = 0
        while True:
            await self._slots.acquire()
            try:
                take = take or _taker(prompts)
                prompt = await take()
            except Exception as error:
                if trio.current_effective_deadline() == -math.inf:
                    raise  # this task is cancelled: no reader waits for the error
                self._pass_on(number, error)
                return
            if prompt is _END:
                return
            nursery.start_soon(self._run_one, number, cast(Prompt, prompt))
            number += 1

    async def _run_one(self, number: int, prompt: Prompt) -> None:
        try:
            result: RequestOutput | Exception = await self._answer(prompt)
        except Exception as error:
            result = error
            self._feeding.cancel()
        self._pass_on(number, result)

    def _pass_on(self, number: int, result: RequestOutput | Exception) -> None:
        # There is always room: the channel is as large as there are slots.
        if not self._is_ordered:
            self._send.send_nowait(result)
            return
        self._held_back[number] = result
        while self._num_sent in self._held_back:
            self._send.send_nowait(self._held_back.pop(self._num_sent))
            self._num_sent += 1


@asynccontextmanager
async def open_map(
    prompts: Prompts, answer: Callable[[Prompt], Awaitable[RequestOutput]], max_in_flight: int, *, ordered: bool
) -> AsyncIterator[MapResults]:
    """Answer `prompts` while the block lasts. See `LibraryCalls.map`.

    Cancellation: leaving the block cancels every unfinished `answer`.
    """
    send, receive = trio.open_memory_channel[RequestOutput | Exception](max_in_flight)
    slots = trio.Semaphore(max_in_flight, max_value=max_in_flight)
    # The receiving side closes last: tasks that end in the very moment of leaving still pass their answers on.
    with unwrap_single(), receive:
        async with trio.open_nursery() as nursery:
            mapping = _Mapping(answer, send, slots, ordered=ordered)
            nursery.start_soon(mapping.run, prompts)
            try:
                yield MapResults(receive, slots, mapping.stop)
            finally:
                nursery.cancel_scope.cancel()


def _taker(prompts: Prompts) -> Callable[[], Awaitable[object]]:
    """A function that takes the next prompt, or _END."""
    if isinstance(prompts, AsyncIterable):
        prompts_later = aiter(prompts)

        async def take_later() -> object:
            return await anext(prompts_later, _END)

        return take_later
    prompts_now = iter(prompts)

    async def take_now() -> object:
        return next(prompts_now, _END)

    return take_now


def _log_clean_up(error: Exception) -> None:
    logger.warning("the prompts of map() failed when no more were wanted", exc_info=error)
