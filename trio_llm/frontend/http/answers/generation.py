"""Generation: the outputs of one HTTP request, from one prompt or from many at once.

Used by the generating routes. `RunningRequests` remembers what runs, so that a drain can end it properly.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.http.answers.assembly import TEXT_ONLY, AnswerContents, Assembler
from trio_llm.frontend.http.answers.client_names import in_client_names
from trio_llm.frontend.http.server.timeouts import NO_TIMEOUT, RequestTimeout
from trio_llm.frontend.requests.balancing import ANYWHERE, Routing
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import SamplingParams

__all__ = ["Generation", "IndexedOutput", "RunningRequests", "check_batch"]

IndexedOutput = tuple[int, RequestOutput]
"""Index of a prompt, and an output for it."""


class RunningRequests:
    """Ids of the requests that run for HTTP clients of one server."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.are_ended = False
        """The server has ended all that ran: see `end_all`."""

    def add(self, request_id: str) -> None:
        self._counts[request_id] = self._counts.get(request_id, 0) + 1

    def discard(self, request_id: str) -> None:
        """Undo one `add`: clients may use an id twice at the same time."""
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]

    def ids(self) -> list[str]:
        return list(self._counts)

    def end_all(self, client: EngineClient) -> int:
        """End every request, since the server stops. Returns how many there were.

        Streams get a last event with the reason `abort`; whole answers become errors.
        """
        self.are_ended = True
        return client.abort(self.ids())


def check_batch(
    config: EngineConfig, prompts: Sequence[str | list[int]], *, field: str, times: int = 1, what: str = "vectors"
) -> None:
    """Refuse a batch that can never be admitted: its prompts are admitted one by one, and all must be in at once.

    Args:
        field: the field of the body that has the prompts.
        times: requests that each prompt becomes.
        what: what the prompts are for.

    Raises:
        InvalidRequestError: the limits of admission are below what these take together.
    """
    num_tokens = times * sum(len(prompt) for prompt in prompts)
    for count, limit, name, flag in (
        (times * len(prompts), config.max_num_queued_reqs, what, "--max-num-queued-reqs"),
        (num_tokens, config.max_num_queued_tokens, "prompt tokens", "--max-num-queued-tokens"),
    ):
        if limit is not None and count > limit:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with {count} {name} are more than this server takes at a time "
                f"({limit}, {flag}); send fewer in one request",
                field,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate for one HTTP request."""

    client: EngineClient
    running: RunningRequests
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    routing: Routing = ANYWHERE
    arrival_time_s: float | None = None
    """Seconds since 1970."""
    trace_headers: Mapping[str, str] | None = None
    timeout: RequestTimeout = NO_TIMEOUT
    contents: AnswerContents = TEXT_ONLY
    with_metrics: bool = False
    """The answer tells how long it took, if it has one choice."""
    param_names: Mapping[str, str] = field(default_factory=dict)
    """Fields of `params` -> the client's names for them, where they differ."""
    prompt_field: str = "prompt"
    """The client's field that the prompts come from."""

    def assembler(self) -> Assembler:
        """A fresh assembler for the outputs of this generation."""
        return Assembler(
            len(self.prompts), choices_per_prompt=self.params.n, contents=self.contents, with_metrics=self.with_metrics
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncIterator[IndexedOutput]]:
        """Admit every prompt; inside, an iterator over the outputs of all of them as they come.

        Cancellation: leaving the block, by any way, aborts whatever is unfinished. Cancelling the iterator's
        `__anext__` takes nothing; it can be called again.

        Raises:
            RequestTimeoutError: the request's time was over before its outputs were taken. The request is aborted at
                once, also while the caller takes nothing.
            InvalidRequestError, EngineError: as `EngineClient.generate`, on entering or by the iterator.
        """
        if len(self.prompts) > 1:
            choices = 1 if self.params.is_greedy else self.params.n
            check_batch(self.client.config, self.prompts, field="prompt", times=choices, what="choices")
        if len(self.prompts) == 1:
            async with self._open_one(0, self.request_id) as outputs, outputs.in_time(self.timeout):
                yield outputs
            return
        # Errors come through the channel, too. Raised in the nursery, they would cancel the reader while it sends
        # something to its client.
        sender, receiver = trio.open_memory_channel[IndexedOutput | Exception](0)
        with unwrap_single(), receiver:
            async with trio.open_nursery() as nursery:
                async with sender:
                    for index in range(len(self.prompts)):
                        nursery.start_soon(self._forward, index, sender.clone())
                try:
                    yield _Merged(receiver)
                finally:
                    nursery.cancel_scope.cancel(reason="the reader of the outputs has left")

    async def _forward(self, index: int, sender: trio.MemorySendChannel[IndexedOutput | Exception]) -> None:
        async with sender:
            try:
                async with self._open_one(index, f"{self.request_id}-{index}") as outputs:
                    with self.timeout.within():
                        async for output in outputs:
                            await sender.send(output)
            except Exception as error:
                await sender.send(error)

    @asynccontextmanager
    async def _open_one(self, index: int, request_id: str) -> AsyncIterator[_Indexed]:
        self.running.add(request_id)
        try:
            async with AsyncExitStack() as stack:
                stream = self.client.generate(
                    self.prompts[index],
                    self.params,
                    request_id=request_id,
                    priority=self.priority,
                    cache_salt=self.cache_salt,
                    data_parallel_rank=self.routing.data_parallel_rank,
                    session_id=self.routing.session_id,
                    arrival_time=self.arrival_time_s,
                    trace_headers=self.trace_headers,
                )
                try:
                    with self.timeout.within():  # its deadline also goes to the engine
                        await stack.enter_async_context(stream)
                except InvalidRequestError as error:
                    raise in_client_names(error, self.param_names, prompt=self.prompt_field) from None
                yield _Indexed(index, stream, stack)
        finally:
            self.running.discard(request_id)


class _Indexed:
    """An iterator that adds the index to each output.

    Args:
        outputs: a stream that was entered.
        block: leaves the stream when it is closed.
    """

    def __init__(self, index: int, outputs: AsyncIterator[RequestOutput], block: AsyncExitStack) -> None:
        self._index = index
        self._outputs = outputs
        self._block = block
        self._is_finished = False
        self._error: Exception | None = None
        """Why the stream was left before it was finished."""

    def __aiter__(self) -> _Indexed:
        return self

    async def __anext__(self) -> IndexedOutput:
        if self._is_finished:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error
        output = await self._outputs.__anext__()
        self._is_finished = output.finished
        return self._index, output

    @asynccontextmanager
    async def in_time(self, timeout: RequestTimeout) -> AsyncIterator[None]:
        """While the block lasts, leave the stream when the time is over.

        The reader has that deadline, too. But its client may be holding it up, and the engine must not work on.
        """
        if timeout.deadline == math.inf:
            yield
            return

        async def leave() -> None:
            await trio.sleep_until(timeout.deadline)
            self._error = timeout.error()
            await self._block.aclose()

        with unwrap_single():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel(reason="the reader of the outputs has left")


@dataclass(slots=True)
class _Merged:
    """An iterator of what comes through a channel, which raises the errors among it."""

    receiver: trio.MemoryReceiveChannel[IndexedOutput | Exception]

    def __aiter__(self) -> _Merged:
        return self

    async def __anext__(self) -> IndexedOutput:
        item = await self.receiver.__anext__()
        if isinstance(item, Exception):
            raise item
        return item
