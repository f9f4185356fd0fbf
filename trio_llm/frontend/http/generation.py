"""Generation: the outputs of one HTTP request, from one prompt or from many at once.

Used by the routes. Remembers which requests run, so that a drain can end them properly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import trio

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.http.timeouts import NO_TIMEOUT, RequestTimeout
from trio_llm.frontend.text.assembly import PLAIN_VIEW, AnswerView, Assembler
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import SamplingParams

__all__ = ["Generation", "IndexedOutput", "RunningRequests"]

IndexedOutput = tuple[int, RequestOutput]
"""Index of the prompt, and an output of it."""


class RunningRequests:
    """Ids of the requests that run for HTTP clients."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, request_id: str) -> None:
        self._counts[request_id] = self._counts.get(request_id, 0) + 1

    def discard(self, request_id: str) -> None:
        """Undo one `add`: clients may use an id twice at the same time."""
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]

    def ids(self) -> list[str]:
        return list(self._counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate for one HTTP request."""

    client: EngineClient
    running: RunningRequests
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    request_id: str
    cache_salt: str | None = None
    timeout: RequestTimeout = NO_TIMEOUT
    view: AnswerView = PLAIN_VIEW
    """What its answer shows."""

    def assembler(self) -> Assembler:
        """What makes the outputs one answer."""
        return Assembler(len(self.prompts), choices_per_prompt=self.params.n, view=self.view)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncIterator[IndexedOutput]]:
        """Admit every prompt; inside, an iterator over the outputs of all of them as they come.

        Cancellation: leaving the block, by any way, aborts whatever is unfinished. Cancelling the iterator's
        `__anext__` takes nothing; it can be called again.

        Raises:
            RequestTimeoutError: the request's time was over before it was admitted.
            InvalidRequestError, EngineError: as `EngineClient.generate`, out of the block, alone or in a group.
        """
        if len(self.prompts) > 1:
            self._check_limits()
        if len(self.prompts) == 1:
            async with self._open_one(0, self.request_id) as outputs:
                yield outputs
            return
        sender, receiver = trio.open_memory_channel[IndexedOutput](0)
        async with trio.open_nursery() as nursery:
            async with sender:
                for index in range(len(self.prompts)):
                    nursery.start_soon(self._forward, index, sender.clone())
            async with receiver:
                yield receiver
            nursery.cancel_scope.cancel(reason="the reader of the outputs has left")

    def _check_limits(self) -> None:
        """Prompts are admitted one by one: those that can never all be in are refused, not told to come back."""
        choices = 1 if self.params.is_greedy else self.params.n
        limits = self.client.config
        num_tokens = choices * sum(len(prompt) for prompt in self.prompts)
        for count, limit, what, flag in (
            (choices * len(self.prompts), limits.max_num_queued_reqs, "choices", "--max-num-queued-reqs"),
            (num_tokens, limits.max_num_queued_tokens, "prompt tokens", "--max-num-queued-tokens"),
        ):
            if limit is not None and count > limit:
                raise InvalidRequestError(
                    f"{len(self.prompts)} prompts with {count} {what} are more than this server takes at a time "
                    f"({limit}, {flag}); send fewer in one request",
                    "prompt",
                )

    async def _forward(self, index: int, sender: trio.MemorySendChannel[IndexedOutput]) -> None:
        async with sender, self._open_one(index, f"{self.request_id}-{index}") as outputs:
            async for output in outputs:
                await sender.send(output)

    @asynccontextmanager
    async def _open_one(self, index: int, request_id: str) -> AsyncIterator[AsyncIterator[IndexedOutput]]:
        self.running.add(request_id)
        try:
            async with AsyncExitStack() as stack:
                stream = self.client.generate(
                    self.prompts[index], self.params, request_id=request_id, cache_salt=self.cache_salt
                )
                with self.timeout.within():  # also tells the engine when nobody reads any more
                    await stack.enter_async_context(stream)
                yield _Indexed(index, stream)
        finally:
            self.running.discard(request_id)


@dataclass(slots=True)
class _Indexed:
    """An iterator of outputs that adds the index."""

    index: int
    outputs: AsyncIterator[RequestOutput]

    def __aiter__(self) -> _Indexed:
        return self

    async def __anext__(self) -> IndexedOutput:
        return self.index, await self.outputs.__anext__()
