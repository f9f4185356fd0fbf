"""OutputProcessor: the engine's rows of token ids become outputs with text.

Pure: a request's state and a row in, `ProcessedRow` out. Keeps no requests. Used by the output handler, which puts the
outputs into mailboxes and sends the aborts that this asks for.
"""

from __future__ import annotations

from typing import Final

import msgspec

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_kinds import make_output
from trio_llm.frontend.requests.output.parallel_sampling import Family
from trio_llm.frontend.requests.output.pooled_output import make_pooled_output
from trio_llm.frontend.requests.output.read_delta import read_delta
from trio_llm.frontend.requests.output.row_checks import check_row
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.text.detokenizer import Detokenizer, TokenTable, make_detokenizer
from trio_llm.frontend.text.logprobs import make_token_logprobs
from trio_llm.frontend.text.stop import StopScanner
from trio_llm.outputs import CompletionOutput, FinishReason, RequestOutput
from trio_llm.sampling import RequestOutputKind
from trio_llm.wire.messages import Continue, EngineCoreOutput, EngineCoreRequest, LogprobRow

__all__ = ["OutputGap", "OutputProcessor", "ProcessedRow"]

_SENT: Final = RequestStatus.SENT
"""Looked up once and not per token."""


class OutputGap(Exception):
    """Rows of a request are missing: a message of the engine was lost."""


class ProcessedRow(msgspec.Struct, frozen=True, gc=False):
    """What one row means. At most one of `output` and `error` is set."""

    num_new_tokens: int = 0
    """Tokens that the reader has got by this row: those after a stop string do not count."""
    output: RequestOutput | None = None
    error: Exception | None = None
    finish_reason: FinishReason | None = None
    """Set once per request: it is over for its reader."""
    must_abort: bool = False
    """It is over for its reader, but the engine does not know yet."""
    is_gone: bool = False
    """The engine's last row: the request is forgotten now."""
    is_expired: bool = False
    """The engine has dropped it, uncomputed. It stays registered: its reader may send it again."""
    is_pooled: bool = False
    """The output has a vector, which is all that the reader waits for."""


class OutputProcessor:
    """Makes the states of requests, and takes their rows.

    Args:
        table: of the loaded model's tokenizer.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.weight_version = "default"
        """The version of the weights behind the rows to come; set before the rows of each message."""
        self.engine_time_s = 0.0
        """The engine's clock when it sent these rows; set likewise."""

    def make_state(
        self, request: EngineCoreRequest, external_id: str, *, index: int = 0, family: Family | None = None
    ) -> RequestState:
        """The state of a new request, not sent yet: with a family, of the child that makes choice `index`.

        A resumable one is a session that has no input yet.
        """
        params = request.params
        state = RequestState(
            request,
            external_id,
            self._make_detokenizer(request),
            StopScanner(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None,
            params.output_kind,
            params.logprobs is not None,
            len(request.prompt_token_ids),
            index,
            family,
            RequestStatus.IDLE if request.resumable else RequestStatus.UNSENT,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            weight_version=self.weight_version,
        )
        state.is_fast_path = (
            params.output_kind is RequestOutputKind.DELTA
            and not (params.stop or state.wants_logprobs or request.resumable)
            and params.prompt_logprobs is None
            and request.pooling_params is None
        )
        return state

    def _make_detokenizer(self, request: EngineCoreRequest) -> Detokenizer:
        return make_detokenizer(
            self._table,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            spaces_between_special_tokens=request.params.spaces_between_special_tokens,
        )

    def begin_answer(
        self,
        state: RequestState,
        message: EngineCoreRequest | Continue,
        token_ids: list[int],
        *,
        num_input_tokens: int,
    ) -> None:
        """A session gets an input.

        Args:
            message: carries the input to the engine.
            token_ids: all before the answer. The list is kept, and may grow.
            num_input_tokens: tokens of all inputs so far.
        """
        state.request = msgspec.structs.replace(
            state.request,
            prompt_token_ids=token_ids,
            params=message.params,
            bad_words_token_ids=message.bad_words_token_ids,
            resumable=True,
        )
        state.detokenizer = self._make_detokenizer(state.request)
        state.wants_logprobs = message.params.logprobs is not None
        state.num_prompt_tokens = num_input_tokens
        state.text.clear()
        del state.token_ids[:]
        state.num_earlier_tokens = state.num_tokens
        state.version_changes.clear()
        state.logprobs.clear()

    def end_session(self, state: RequestState, reason: FinishReason) -> RequestOutput | None:
        """The last output of a session whose answers are all over: nothing new, and the last answer's reason again."""
        return make_output(state, CompletionOutput(state.index, "", [], [] if state.wants_logprobs else None, reason))

    def finish(self, state: RequestState) -> RequestOutput | None:
        """The last output of a request that is aborted on demand: what was held back, and the finish reason `abort`.

        None: the reader gets it together with the other choices, which are not over.
        """
        text = state.detokenizer.finish()
        if state.scanner is not None:
            text = state.scanner.feed(text) + state.scanner.finish()
        delta = CompletionOutput(state.index, text, [], [] if state.wants_logprobs else None, "abort")
        return make_output(state, delta)

    def process_delta(self, state: RequestState, row: EngineCoreOutput) -> RequestOutput | None:
        """Take a row of the kind that nearly all are: tokens in the middle of an answer, of which nothing but their
        text is wanted. The same as `process`, at half the cost.

        Returns:
            What the reader gets. None: nothing was done, the row is one for `process`.
        """
        if (
            not state.is_fast_path
            or row.finish_reason is not None
            or row.start != state.num_tokens
            or row.start == 0
            or not row.new_token_ids
            or state.status is not _SENT
            or state.num_deaths
        ):
            return None
        token_ids = row.new_token_ids
        try:
            text = state.detokenizer.feed(token_ids)
        except Exception:
            return None  # `process` gets the same, and makes it this request's error
        version = self.weight_version
        if version != state.weight_version:
            state.mark_weight_version(version)
        state.num_tokens += len(token_ids)
        state.token_ids.extend(token_ids)
        num_cached_tokens = state.num_cached_tokens if state.family is None else state.family.num_cached_tokens
        delta = CompletionOutput(state.index, text, token_ids, None, None)
        return RequestOutput(
            state.external_id, state.num_prompt_tokens, num_cached_tokens, [delta], False, None, version
        )

    def process(self, state: RequestState, row: EngineCoreOutput) -> ProcessedRow | None:
        """Take one row of this request, and move its status. None: there is nothing to do.

        Whatever is wrong with a row is the error of its request alone.

        Raises:
            OutputGap: a row before this one is missing.
        """
        is_gone = row.finish_reason is not None and not row.goes_on
        if state.status is RequestStatus.ABORTING:
            if not is_gone:
                return None
            state.move(RequestStatus.GONE)
            return ProcessedRow(is_gone=True)
        if state.num_tokens_when_sent is None or state.status is RequestStatus.GONE:
            return None  # the engine does not have it: an abort and the end may cross
        if self.weight_version != state.weight_version:
            state.mark_weight_version(self.weight_version)
        if row.start > state.num_tokens:
            raise OutputGap(
                f"request {row.request_id} has {state.num_tokens} tokens and got a row that starts at {row.start}"
            )
        if row.is_expired and state.status is RequestStatus.SENT:
            state.mark_expired()
            return ProcessedRow(is_expired=True)
        try:
            return self._take(state, row, is_gone=is_gone)
        except OutputGap:
            raise
        except Exception as error:
            return _fail(state, error, is_gone=is_gone)

    def _take(self, state: RequestState, row: EngineCoreOutput, *, is_gone: bool) -> ProcessedRow | None:
        """Take a row of a request that the engine has.

        Raises:
            OutputGap: as `process`.
            Exception: something is wrong with the row.
        """
        if row.queued_s is not None:
            state.queued_s = row.queued_s
        if row.scheduled_s is not None:
            state.prefill_s = self.engine_time_s - row.scheduled_s
        if row.finish_reason is not None:
            state.num_preemptions = row.num_preemptions
        if row.finish_reason == "error":
            raise EngineGenerateError(row.error or "the engine ended the request without a reason")
        check_row(state, row)
        if row.num_cached_tokens:
            _note_cached_tokens(state, row.num_cached_tokens)
        if row.prompt_logprobs is not None:
            self._take_prompt_logprobs(state, row, row.prompt_logprobs)
            return None
        if state.request.pooling_params is not None and is_gone:
            return _take_vector(state, row)
        delta = read_delta(state, row, self._table)
        if row.goes_on:
            return _end_answer(state, delta)
        must_abort = delta.finish_reason is not None and not is_gone
        output = make_output(state, delta)
        if is_gone:
            state.move(RequestStatus.GONE)
        elif must_abort:
            state.move(RequestStatus.ABORTING)
        return ProcessedRow(
            num_new_tokens=len(delta.token_ids),
            output=output,
            finish_reason=delta.finish_reason,
            must_abort=must_abort,
            is_gone=is_gone,
        )

    def _take_prompt_logprobs(self, state: RequestState, row: EngineCoreOutput, rows: list[LogprobRow]) -> None:
        """Keep what the row adds of them: they go out together with the first token. Repeats are left out.

        Raises:
            OutputGap: as `process`.
        """
        known = state.prompt_logprobs
        if known is None:
            return
        if row.prompt_logprobs_start > len(known):
            raise OutputGap(
                f"request {row.request_id} has log-probabilities of {len(known)} prompt tokens "
                f"and got a row that starts at {row.prompt_logprobs_start}"
            )
        known += [make_token_logprobs(one, self._table) for one in rows[len(known) - row.prompt_logprobs_start :]]


def _fail(state: RequestState, error: Exception, *, is_gone: bool) -> ProcessedRow:
    """The request ends with this error, and its engine need not go on with it."""
    if not isinstance(error, EngineGenerateError):
        named = EngineGenerateError(f"the output could not be processed: {type(error).__name__}: {error}")
        named.__cause__ = error
        error = named
    state.move(RequestStatus.GONE if is_gone else RequestStatus.ABORTING)
    return ProcessedRow(error=error, finish_reason="error", must_abort=not is_gone, is_gone=is_gone)


def _take_vector(state: RequestState, row: EngineCoreOutput) -> ProcessedRow:
    """A pooling request is over."""
    output = make_pooled_output(state.external_id, state.num_prompt_tokens, row, state.weight_version)
    state.move(RequestStatus.GONE)
    return ProcessedRow(output=output, finish_reason=row.finish_reason, is_gone=True, is_pooled=True)


def _note_cached_tokens(state: RequestState, count: int) -> None:
    state.num_cached_tokens = count
    if state.family is not None and state.index == 0:
        state.family.num_cached_tokens = count


def _end_answer(state: RequestState, delta: CompletionOutput) -> ProcessedRow:
    """One answer of a session is over, and the session is not."""
    output = make_output(state, delta)
    assert output is not None
    output.finished = False
    state.move(RequestStatus.IDLE)
    return ProcessedRow(num_new_tokens=len(delta.token_ids), output=output)
