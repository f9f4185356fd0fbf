"""LibraryCalls: whole answers, chats and many prompts at once, for programs that use a client directly.

Everything here is made of `generate()`, `encode()` and the renderer, so any client can derive from it. The HTTP routes
do without.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Never

import msgspec

from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.keyword_errors import make_keyword_error
from trio_llm.frontend.library.bulk import MapResults, Prompts, open_map
from trio_llm.frontend.requests.input_processor import check_task, make_external_id
from trio_llm.frontend.requests.pooling import cosine
from trio_llm.frontend.requests.stream import RequestStream
from trio_llm.frontend.run_in_order import run_in_order
from trio_llm.outputs import RequestOutput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.tokenization import PLAIN, TokenizationParams

__all__ = ["ChatStream", "LibraryCalls", "Message"]

Message = Mapping[str, Any]
"""`{"role": "user", "content": "Hello"}`, in the form of OpenAI's API."""


class LibraryCalls(EngineClient):
    """The base of clients that programs use directly."""

    async def complete(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        tokenization: TokenizationParams | None = None,
        **fields: Any,
    ) -> RequestOutput:
        """The whole answer to one prompt (text or token ids).

        Args:
            tokenization: as `EngineClient.generate`.
            fields: fields of SamplingParams, set in a copy of `params`: `await llm.complete("Once", max_tokens=9)`.
                `output_kind` is always FINAL_ONLY.

        Cancellation: safe; the request is aborted in the engine.

        Raises:
            InvalidRequestError: the request can never work.
            OverloadedError: as much is unfinished as may be.
            EngineUnavailableError: the engine is loading, draining or asleep.
            EngineGenerateError: this request failed.
            EngineDeadError: the engine is gone.
        """
        async with self.generate(prompt, _whole(params, fields), tokenization=tokenization) as stream:
            return await _only(stream)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tokenization: TokenizationParams | None = None,
        **fields: Any,
    ) -> RequestOutput:
        """The whole answer to a conversation.

        Args:
            messages: with roles that the model's chat template knows; the last one is usually the user's.
            template_kwargs: extra variables of the template.
            add_generation_prompt: the template opens the assistant's turn. None: unless a message is continued.
            continue_final_message: the answer continues the last message; excludes `add_generation_prompt`.
            tokenization: as `EngineClient.generate`; the tokenizer's own special tokens are left out unless it asks for
                them.
            fields: as `complete`.

        Cancellation: safe; the request is aborted in the engine.

        Raises:
            InvalidRequestError: the messages are malformed or the template refuses them; and as `complete`.
            EngineError: as `complete`.
        """
        stream = self.stream_chat(
            messages,
            _whole(params, fields),
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenization=tokenization,
        )
        async with stream:
            return await _only(stream)

    async def embed(
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        tokenization: TokenizationParams | None = None,
        **fields: Any,
    ) -> list[float]:
        """The embedding of one prompt (text or token ids), of length 1 unless `normalize=False`.

        Args:
            tokenization: as `EngineClient.encode`.
            fields: fields of PoolingParams, set in a copy of `params`: `await llm.embed("Once", pooling="mean")`.

        Cancellation: safe; the request is aborted in the engine.

        Raises:
            NotSupportedError: the model makes no embeddings.
            InvalidRequestError, EngineUnavailableError, EngineGenerateError, EngineDeadError: as `complete`.
        """
        return (await self.encode(prompt, _embedding(params, fields), tokenization=tokenization)).values

    async def score(
        self,
        text_1: str | list[int],
        text_2: str | list[int],
        params: PoolingParams | None = None,
        *,
        tokenization: TokenizationParams | None = None,
        **fields: Any,
    ) -> float:
        """How alike two texts are to the model: the cosine of their embeddings, from -1 to 1.

        Args, cancellation and errors: as `embed`; classifiers do not score. Both embeddings are made at the same time.
        """
        check_task(self.get_supported_tasks(), "score")
        whole = _embedding(params, fields)
        encode = partial(self.encode, params=whole, tokenization=tokenization)
        first, second = await run_in_order(encode, [text_1, text_2])
        return cosine(first.values, second.values)

    def stream_chat(  # noqa: PLR0913 - what OpenAI's API and vLLM let a chat say, by their names
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tokenization: TokenizationParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        **unknown: Never,
    ) -> ChatStream:
        """The answer to a conversation, as it comes. Used as `generate()` is.

        Messages become token ids on entering; what is wrong with them raises there.

        Args:
            messages, template_kwargs, add_generation_prompt, continue_final_message, tokenization: as `chat`.
            request_id, priority, cache_salt, data_parallel_rank, session_id, trace_headers: as
                `EngineClient.generate`.
        """
        if unknown:
            raise make_keyword_error("stream_chat", "messages", unknown)
        request_id = make_external_id(request_id)

        async def render() -> RequestStream:
            arrival_time = time.time()
            self.check_admission()  # before the costly part
            text = await self.renderer.render_chat(
                _as_dicts(messages),
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=None if template_kwargs is None else dict(template_kwargs),
            )
            return self.generate(
                text,
                params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                data_parallel_rank=data_parallel_rank,
                session_id=session_id,
                tokenization=(PLAIN if tokenization is None else tokenization).for_chat(),
                arrival_time=arrival_time,
                trace_headers=trace_headers,
            )

        return ChatStream(request_id, render)

    def map(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        max_in_flight: int = 256,
        ordered: bool = True,
        tokenization: TokenizationParams | None = None,
        **fields: Any,
    ) -> AbstractAsyncContextManager[MapResults]:
        """Whole answers to many prompts, with bounded memory.

        Use: `async with llm.map(prompts, max_tokens=9) as results: async for output in results: ...`

        Args:
            prompts: texts or lists of token ids; any iterable or async iterable, endless ones too. It is read as
                far as `max_in_flight` allows and no further. A plain iterable must not block. An async generator is
                closed at the end.
            max_in_flight: prompts that are running, or answered and not taken by the reader yet; at least 1.
            ordered: answers come in the order of the prompts. False: as they are finished.
            tokenization, fields: as `complete`.

        Cancellation: leaving the block, by any way, aborts in the engine what is unfinished.

        Raises (from the iteration):
            What `complete` raises, for the first prompt that fails: in its turn, or without `ordered` after the answers
            that came before it. No further prompt is begun then, what runs is aborted, and the iteration is over.
            Errors of `prompts` itself come the same way.

        Raises (at once):
            ValueError: `max_in_flight` is below 1.
            TypeError: `prompts` is a text; or there is no such field.
        """
        if isinstance(prompts, str):
            raise TypeError("map() takes prompts, not one text; use complete() for one")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
        whole = _whole(params, fields)
        return open_map(
            prompts,
            lambda prompt: self.complete(prompt, whole, tokenization=tokenization),
            max_in_flight,
            ordered=ordered,
        )


class ChatStream:
    """A conversation's answer as a block of code. Implements `RequestStream`.

    Args:
        request_id: the caller's id.
        render: makes the stream to read from, not entered yet.
    """

    def __init__(self, request_id: str, render: Callable[[], Awaitable[RequestStream]]) -> None:
        self._request_id = request_id
        self._render = render
        self._was_entered = False
        self._stream: RequestStream | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._request_id!r}: {self._stream or 'new'}>"

    @property
    def request_id(self) -> str:
        """The caller's id of the request, or the one made for the caller."""
        return self._request_id

    async def __aenter__(self) -> ChatStream:
        """Render the messages, check and send the request.

        Cancellation: safe. If this raises, nothing was sent and nothing is registered.

        Raises: as `LibraryCalls.chat`.
        """
        if self._was_entered:
            raise RuntimeError("a stream can be entered once; call stream_chat() again")
        self._was_entered = True
        stream = await self._render()
        await stream.__aenter__()
        self._stream = stream
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Abort the request unless it is over. Never waits."""
        assert self._stream is not None
        return await self._stream.__aexit__(kind, error, traceback)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        if self._stream is None:
            raise RuntimeError(
                "a stream is a block: `async with llm.stream_chat(...) as stream:`, then `async for output in stream:`"
            )
        return self

    async def __anext__(self) -> RequestOutput:
        """As `GenerateStream.__anext__`."""
        if self._stream is None:
            raise RuntimeError(f"{self!r} cannot be read outside its block")
        return await self._stream.__anext__()


def _whole(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """Parameters for one answer in one piece.

    Raises:
        InvalidRequestError: a value is out of range.
        TypeError: there is no such field.
    """
    params = SamplingParams() if params is None else params
    return msgspec.structs.replace(params, **{**fields, "output_kind": RequestOutputKind.FINAL_ONLY})


def _embedding(params: PoolingParams | None, fields: Mapping[str, Any]) -> PoolingParams:
    """Parameters for an embedding. Raises as `_whole`."""
    params = PoolingParams() if params is None else params
    return msgspec.structs.replace(params, **{**fields, "task": "embed"})


async def _only(stream: RequestStream) -> RequestOutput:
    return await anext(stream)  # FINAL_ONLY: there is one


def _as_dicts(messages: Any) -> Any:
    """Messages of any mapping type as the renderer takes them; it refuses whatever else this is."""
    if not isinstance(messages, list | tuple):
        return messages
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]
