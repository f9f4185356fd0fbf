"""Sessions: one request that goes on with input after input, which the caller's async iterable gives.

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
from trio_llm.frontend.requests.balancing import Routing
from trio_llm.frontend.requests.collector import RequestOutputCollector, Unread
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.input_processor import InputProcessor
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.tokenization import PLAIN
from trio_llm.wire.messages import Continue, EngineCoreRequest

__all__ = ["Session", "SessionCollector", "StreamingInput", "check_session_params"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamingInput:
    """One input of a session: a request whose prompt is an async iterable of these.

    Each input continues all inputs and answers before it, with the tokens that ended them. They are in the engine's
    cache, and are computed again only if others needed the room. The text of later inputs gets no special tokens of the
    tokenizer's own.

    The next input is asked for when the reader has taken the end of an answer: an output with the answer's finish
    reason and `finished=False`. After the last answer, an output with nothing new, the same finish reason and
    `finished=True` ends the stream. With CUMULATIVE, an output has all of the newest answer.

    What is wrong with an input, and what the iterable itself raises, is raised by the stream. The iterable is read in a
    task of the client; an async generator is closed at the end. An input for which `max_num_queued_tokens` has no room
    waits and is not refused. A session has no deadline. `drain()` ends it by the finish reason `abort`, after the
    answer that is under way.
    """

    prompt: str | list[int]
    params: SamplingParams | None = None
    """Parameters of the answer to this input. None: those that `generate()` was called with."""


def check_session_params(params: SamplingParams) -> None:
    """
    Raises:
        InvalidRequestError: a session cannot have them; `param` names the field.
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
    """The mailbox of a session. Lets its feeding task know when an answer was taken, and when nothing more is wanted.

    Args:
        kind: DELTA or CUMULATIVE.
        stop_feeding: is called when the session is over for its reader, in any way. Synchronous; several times.
    """

    __slots__ = ("_is_delta", "_stop_feeding", "answer_taken", "finish_reason", "token_ids")

    def __init__(self, kind: RequestOutputKind, stop_feeding: Callable[[], None]) -> None:
        super().__init__(kind)
        self._is_delta = kind is RequestOutputKind.DELTA
        self._stop_feeding = stop_feeding
        self.token_ids: list[int] = []
        """Tokens of the newest answer."""
        self.finish_reason: FinishReason | None = None
        """Finish reason of the newest answer; None until its end was taken."""
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

    The next input is asked for when the reader has taken the end of the answer before it: so answers never merge in the
    mailbox, and a slow reader slows its own session alone.

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
        report: RequestReport,
        routing: Routing,
        renderer: Renderer,
        input_processor: InputProcessor,
        registry: RequestRegistry,
    ) -> None:
        self._inputs = inputs
        self._blank = blank
        self._params = blank.params
        self._renderer = renderer
        self._input_processor = input_processor
        self._registry = registry
        self._scope: Final = trio.CancelScope()
        self._collector = SessionCollector(blank.params.output_kind, self._scope.cancel)
        self._internal_id = blank.request_id
        self._token_ids: list[int] = []
        """Tokens of all inputs and answers, in order."""
        self._num_input_tokens = 0
        self._is_idle = True
        """No answer is under way."""
        self._is_draining = False
        self.request: InFlightRequest = registry.open_session(blank, self._collector, report, routing)

    async def run(self) -> None:
        """Feed the engine until the inputs or the session end. Errors go to the reader, or to the log if it has left.

        Cancellation: safe; the request stays as it is, for its reader to leave.
        """
        with errors_to(self._fail):  # errors of the caller's iterable: the reader gets them as they are
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
        token_ids = one.prompt
        if isinstance(token_ids, str):
            token_ids = await self._renderer.render_prompt(token_ids, PLAIN if is_first else PLAIN.for_chat())
        bad_words = await self._renderer.render_bad_words(params.bad_words) if params.bad_words else []
        if not isinstance(token_ids, list) or not token_ids:
            raise InvalidRequestError("an input has no tokens", "prompt")
        message = self._message(token_ids, params, bad_words)
        has_room = trio.Event()
        self._registry.queue_input(self.request, len(token_ids), has_room.set)
        await has_room.wait()
        # If the session was ended meanwhile, its abort was sent, and nothing must be sent after that.
        await trio.lowlevel.checkpoint()
        self._token_ids += token_ids
        self._num_input_tokens += len(token_ids)
        self._collector.begin_answer()
        self._registry.send_input(
            self.request, message, token_ids=self._token_ids, num_input_tokens=self._num_input_tokens
        )

    def _message(
        self, token_ids: list[int], params: SamplingParams, bad_words: list[list[int]]
    ) -> EngineCoreRequest | Continue:
        """The message that carries an input, which is checked. What came before may be long and is not looked at."""
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
        """The iterable has ended."""
        if not self._token_ids:
            self._fail(InvalidRequestError("the iterable gave no input", "prompt"))
            return
        assert self._collector.finish_reason is not None
        self._end(self._collector.finish_reason)

    def _end(self, reason: FinishReason) -> None:
        output = self._registry.end_session(self.request, reason)
        if output is not None:
            self._collector.put(output)

    def _fail(self, error: Exception) -> None:
        self._collector.put_error(error)  # first, so that the observers of requests learn why it ends
        was_over = self._registry.end_session(self.request, "error") is None
        if was_over:
            logger.warning("the inputs of %s failed when it was over already", self._internal_id, exc_info=error)
