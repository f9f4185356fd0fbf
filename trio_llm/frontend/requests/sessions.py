"""Sessions: one request that goes on with input after input, each given by the caller's async iterable.

The engine keeps what it has computed between them. The task that reads the iterable runs in the nursery of `open_llm`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.exception_groups import errors_to
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.collector import RequestOutputCollector, Unread
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.input_processor import InputProcessor
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import Continue, EngineCoreRequest

__all__ = ["Session", "SessionCollector", "StreamingInput", "check_session_params"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """What a session goes on with. The text of later inputs gets no special tokens of the tokenizer's own."""

    prompt: str | list[int]
    params: SamplingParams | None = None
    """For the answer to this input. None: those that `generate()` was called with."""


def check_session_params(params: SamplingParams) -> None:
    """
    Raises:
        InvalidRequestError: they are none for a session; `param` names the field.
    """
    if params.n > 1:
        raise InvalidRequestError("n must be 1 when the prompt is an iterable of inputs", "n")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        raise InvalidRequestError(
            "output_kind must not be FINAL_ONLY when the prompt is an iterable of inputs: each has an end",
            "output_kind",
        )
    if params.stop:
        raise InvalidRequestError(
            "stop strings cannot be used when the prompt is an iterable of inputs: the engine is past them when they "
            "are found; use stop_token_ids",
            "stop",
        )
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be used when the prompt is an iterable of inputs", "prompt_logprobs"
        )


class SessionCollector(RequestOutputCollector):
    """The mailbox of a session. Tells its feeding task when an answer was taken, and when nothing more is wanted.

    Args:
        kind: DELTA or CUMULATIVE.
        stop_feeding: is called when the session is over for its reader, whatever the way. Synchronous; several times.
    """

    __slots__ = ("_is_delta", "_stop_feeding", "answer_taken", "finish_reason", "token_ids")

    def __init__(self, kind: RequestOutputKind, stop_feeding: Callable[[], None]) -> None:
        super().__init__(kind)
        self._is_delta = kind is RequestOutputKind.DELTA
        self._stop_feeding = stop_feeding
        self.token_ids: list[int] = []
        """Of the newest answer."""
        self.finish_reason: FinishReason | None = None
        """Of the newest answer, since its end was taken."""
        self.answer_taken = trio.Event()

    def begin_answer(self) -> None:
        """An input is sent."""
        self.token_ids = []
        self.finish_reason = None
        self.answer_taken = trio.Event()

    def put(self, output: RequestOutput) -> int:
        for choice in output.outputs:
            if self._is_delta:
                self.token_ids += choice.token_ids
            else:
                self.token_ids = choice.token_ids
        if output.finished:
            self._stop_feeding()
        return super().put(output)

    def put_error(self, error: BaseException) -> None:
        super().put_error(error)
        self._stop_feeding()

    def unpack(self, unread: Unread) -> RequestOutput:
        """As its base."""
        output = super().unpack(unread)
        if output.outputs and output.outputs[0].finish_reason is not None:
            self.finish_reason = output.outputs[0].finish_reason
            self.answer_taken.set()
        return output

    def close(self) -> None:
        super().close()
        self._stop_feeding()


class Session:
    """One session: registered when made; `run` feeds it.

    The next input is asked for when the reader has taken the end of the answer to the one before: so answers never run
    together in the mailbox, and a reader that is slow slows its own session alone.

    Args:
        inputs: the caller's; an async generator is closed at the end.
        blank: the request without a prompt; its parameters, checked by `check_session_params`, are for inputs that
            bring none.
    """

    def __init__(
        self,
        inputs: AsyncIterable[StreamingInput],
        blank: EngineCoreRequest,
        *,
        external_id: str,
        renderer: Renderer,
        input_processor: InputProcessor,
        requests: RequestRegistry,
    ) -> None:
        self._inputs = inputs
        self._blank = blank
        self._params = blank.params
        self._renderer = renderer
        self._input_processor = input_processor
        self._requests = requests
        self._scope: Final = trio.CancelScope()
        self._collector = SessionCollector(blank.params.output_kind, self._scope.cancel)
        self._internal_id = blank.request_id
        self._token_ids: list[int] = []
        """Of all inputs and answers, in order."""
        self._num_input_tokens = 0
        self._is_idle = True
        """No answer is under way."""
        self._is_draining = False
        self.request: InFlightRequest = requests.open_session(blank, external_id, self._collector, trio.current_time())

    async def run(self) -> None:
        """Feed the engine until the inputs or the session end. Errors go to the reader, or to the log if it has left.

        Cancellation: safe; the request stays as it is, for its reader to leave.
        """
        with errors_to(self._fail):  # they are the caller's: whatever they are, they are the reader's, as themselves
            with self._scope:
                await self._feed()
            if not self._scope.cancelled_caught:
                self._finish()

    def drain(self) -> None:
        """Take no further input: the session ends by `abort`, after the answer that is under way. Synchronous."""
        self._is_draining = True
        if self._is_idle:
            self._end("abort")

    async def _feed(self) -> None:
        iterator = aiter(self._inputs)
        try:
            async for one in iterator:
                self._is_idle = False
                await self._take(one)
                await self._collector.answer_taken.wait()
                self._token_ids += self._collector.token_ids
                self._is_idle = True
                if self._is_draining:
                    self._end("abort")
                    return
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    async def _take(self, one: StreamingInput) -> None:
        """Check one input and send it, when there is room for it."""
        if not isinstance(one, StreamingInput):
            raise InvalidRequestError(f"the inputs must be StreamingInput, not {type(one).__name__}", "prompt")
        params = self._params if one.params is None else one.params
        check_session_params(params)
        if params.output_kind is not self._params.output_kind:
            raise InvalidRequestError("output_kind must be the same for all inputs", "output_kind")
        is_first = not self._token_ids
        token_ids = await self._renderer.render_prompt(one.prompt, add_special_tokens=is_first)
        bad_words = await self._renderer.render_bad_words(params.bad_words) if params.bad_words else []
        if not isinstance(token_ids, list) or not token_ids:
            raise InvalidRequestError("an input has no tokens", "prompt")
        message = self._message(token_ids, params, bad_words)
        has_room = trio.Event()
        self._requests.queue_input(self.request, len(token_ids), has_room.set)
        await has_room.wait()
        # Whoever has ended the session meanwhile has told the engine so: nothing must be sent after that.
        await trio.lowlevel.checkpoint()
        self._token_ids += token_ids
        self._num_input_tokens += len(token_ids)
        self._collector.begin_answer()
        self._requests.send_input(
            self.request, message, token_ids=self._token_ids, num_input_tokens=self._num_input_tokens
        )

    def _message(
        self, token_ids: list[int], params: SamplingParams, bad_words: list[list[int]]
    ) -> EngineCoreRequest | Continue:
        """What tells the engine of an input, which is checked. What came before is not looked at: it may be long."""
        if self._token_ids:
            return self._input_processor.process_input(
                token_ids,
                params,
                request_id=self._internal_id,
                num_earlier_tokens=len(self._token_ids),
                bad_words_token_ids=bad_words,
            )
        request = self._input_processor.process(
            token_ids,
            params,
            request_id=self._internal_id,
            priority=self._blank.priority,
            cache_salt=self._blank.cache_salt,
            bad_words_token_ids=bad_words,
        )
        return msgspec.structs.replace(request, resumable=True)

    def _finish(self) -> None:
        """The inputs have come to their end."""
        if not self._token_ids:
            self._fail(InvalidRequestError("the iterable gave no input", "prompt"))
            return
        assert self._collector.finish_reason is not None
        self._end(self._collector.finish_reason)

    def _end(self, reason: FinishReason) -> None:
        output = self._requests.end_session(self.request, reason)
        if output is not None:
            self._collector.put(output)

    def _fail(self, error: Exception) -> None:
        was_over = self._requests.end_session(self.request, "error") is None
        self._collector.put_error(error)
        if was_over:
            logger.warning("the inputs of %s failed when it was over already", self._internal_id, exc_info=error)
