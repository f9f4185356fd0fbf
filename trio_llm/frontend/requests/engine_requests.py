"""EngineRequests: what one engine is sent, one incarnation after the other.

Used by `RequestRegistry`, which has one per engine. Synchronous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import trio

from trio_llm.errors import CodecError, EngineGenerateError, InvalidRequestError
from trio_llm.frontend.requests.in_flight import InFlightRequest, make_finished_stats, make_metrics
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.resumption import Resumption
from trio_llm.frontend.statistics.iteration import EngineRecorder
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.wire.codec import encode
from trio_llm.wire.messages import Abort, Continue, EngineCoreRequest, ToEngine

__all__ = ["EngineLink", "EngineRequests", "make_blame"]


class EngineLink(Protocol):
    """One engine, as the requests see it: all its incarnations, one after the other."""

    @property
    def index(self) -> int:
        """Its place among the engines of this front end, from 0."""
        ...

    @property
    def is_up(self) -> bool:
        """False from the death of an incarnation until the next one is ready. Nothing is sent meanwhile."""
        ...

    @property
    def is_dead(self) -> bool:
        """No other incarnation follows the last one."""
        ...

    def can_run(self, *, has_begun: bool) -> bool:
        """The engine is free to work for a request: not asleep, and not paused for requests that have begun or not."""
        ...

    def send_nowait(self, message: ToEngine) -> None:
        """Queue one message. Synchronous.

        Raises:
            CodecError: the message has no form on the wire. Nothing was queued.
        """
        ...


class EngineRequests:
    """Sends requests to an engine, and after its death those that are unfinished to the next incarnation.

    Args:
        recorder: counts what comes of them; None: nothing does.
        in_flight: the registry's requests, those of other engines among them.
        counts_work: this engine is one of several, which are balanced.
    """

    def __init__(
        self,
        link: EngineLink,
        recorder: EngineRecorder | None,
        in_flight: Mapping[str, InFlightRequest],
        *,
        counts_work: bool = False,
    ) -> None:
        self.link = link
        self._in_flight = in_flight
        self._resumption = Resumption[RequestState]()
        self.recorder = recorder
        self._counts_work = counts_work
        self.num_in_flight = 0
        """How many of the requests are this engine's."""
        self.work = 0
        """What they all count with."""
        self.others_work = 0
        """What the engine owes to other front ends, as it said last."""

    def __iter__(self) -> Iterator[InFlightRequest]:
        """This engine's unfinished requests, in order of arrival."""
        return (request for request in self._in_flight.values() if request.engine_index == self.link.index)

    def add(self, request: InFlightRequest) -> None:
        """The request is this engine's from now on."""
        self.num_in_flight += 1
        self.count_work(request)

    def remove(self, request: InFlightRequest) -> None:
        """The request is over, or another engine's from now on."""
        self.num_in_flight -= 1
        self.work -= request.work
        request.work = 0

    def count_work(self, request: InFlightRequest) -> None:
        """Something was done for one of its requests, or more is to be done."""
        if self._counts_work:
            before, request.work = request.work, request.measure_work()
            self.work += request.work - before

    @property
    def num_expected(self) -> int:
        """Requests that the engine has and owes an answer."""
        owed = RequestStatus.SENT, RequestStatus.ABORTING
        return sum(request.state.status in owed for request in self)

    def send(self, request: InFlightRequest, message: EngineCoreRequest | Continue) -> None:
        """Send a request, or let it wait for the next incarnation if there is none now.

        Raises:
            CodecError: it has no form on the wire.
        """
        state = request.state
        request.clock.mark_sent(trio.current_time(), is_up=self.link.is_up)
        if self._counts_work:
            request.num_sent_tokens = _count_tokens(message)
        if self.link.is_up:
            self.link.send_nowait(message)
            state.mark_sent()
            return
        encode(message)  # the caller gets the error now; `on_ready` sends it
        if state.status is not RequestStatus.UNSENT:
            state.move(RequestStatus.UNSENT)

    def resume(self, request: InFlightRequest) -> None:
        """Send a request to an incarnation that does not have it, to go on after what was delivered."""
        self.send(request, _make_resumed(request, trio.current_time()))

    def send_all(self, choices: Sequence[InFlightRequest]) -> None:
        """Send new requests, all or none.

        Raises:
            CodecError: one of them has no form on the wire. The engine is sent an abort for those before it.
        """
        try:
            for choice in choices:
                self.send(choice, choice.state.request)
        except CodecError:
            self.abort([choice.state.request_id for choice in choices if choice.state.status is RequestStatus.SENT])
            raise

    def send_input(
        self,
        session: InFlightRequest,
        message: EngineCoreRequest | Continue,
        *,
        processor: OutputProcessor,
        token_ids: list[int],
        num_input_tokens: int,
    ) -> None:
        """Send the next input of a session that is not over.

        Args:
            message: carries the input to an engine that has all before it.
            token_ids: all inputs and answers, this input included; the list may grow afterwards.
            num_input_tokens: tokens of all inputs so far, this one included.

        Raises:
            InvalidRequestError: it has no form on the wire.
        """
        state = session.state
        try:
            encode(message)
        except CodecError as error:
            raise InvalidRequestError(f"the input cannot be sent to the engine: {error}") from error
        session.has_first_token = False
        if self.recorder is not None and session.clock.first_token_s is not None:
            self.recorder.more_prompt_tokens(num_input_tokens - state.num_prompt_tokens)
        processor.begin_answer(state, message, token_ids, num_input_tokens=num_input_tokens)
        if isinstance(message, Continue) and state.num_tokens_when_sent is None:
            self.resume(session)  # this incarnation does not have the earlier inputs, or there is none yet
        else:
            self.send(session, message)
        self.count_work(session)

    def abort(self, request_ids: list[str]) -> None:
        """Let the engine forget requests that it has."""
        if request_ids:
            self.link.send_nowait(Abort(request_ids))

    def record_tokens(self, request: InFlightRequest, count: int, now_s: float) -> None:
        """A row brought tokens for the reader."""
        state, clock = request.state, request.clock
        is_first = clock.first_token_s is None
        if is_first:
            clock.mark_first_token(now_s, queued_s=state.queued_s, prefill_s=state.prefill_s)
            request.report.note_first_token(clock)
        if self.recorder is None:
            return
        if not is_first:
            self.recorder.tokens(clock, count, now_s)
        elif state.family is None or state.family.take_first_token():
            # One prompt and one first token for all the choices of an answer; each choice is a request that ends.
            self.recorder.first_tokens(
                clock,
                count,
                now_s,
                num_prompt_tokens=len(state.request.prompt_token_ids),
                num_cached_tokens=state.num_cached_tokens,
            )
        else:
            self.recorder.first_tokens_of_sibling(count)

    def record_vector(self, request: InFlightRequest, now_s: float) -> None:
        """A row brought the vector of a pooling request."""
        state = request.state
        request.clock.mark_first_token(now_s, queued_s=state.queued_s, prefill_s=state.prefill_s)
        if self.recorder is not None:
            self.recorder.vector(num_prompt_tokens=state.num_prompt_tokens, num_cached_tokens=state.num_cached_tokens)

    def record_end(self, request: InFlightRequest, reason: FinishReason) -> None:
        """A request is over for its reader."""
        stats = make_finished_stats(request, reason, trio.current_time(), knows_last_token=self.recorder is not None)
        if self.recorder is not None:
            self.recorder.request_finished(stats)
        request.report.end_choice(stats, request.collector.error)

    def with_metrics(self, request: InFlightRequest, output: RequestOutput | None) -> RequestOutput | None:
        """As the registry's."""
        if output is not None and output.finished and self.recorder is not None:
            output.metrics = make_metrics(request, trio.current_time())
        return output

    def finish_trial(self, request: InFlightRequest) -> None:
        """A suspect has got a token, or will get none. If it was on trial, the next one is sent."""
        for state in self._resumption.finish(request.state):
            self.resume(self._in_flight[state.request_id])

    def on_lost(self) -> InFlightRequest | None:
        """The incarnation is dead: what it had waits for the next one.

        Returns:
            The request that is to be given up, which no engine has.
        """
        self.others_work = 0
        requests = list(self)
        suspect = self._resumption.engine_lost(
            [request.state for request in requests],
            could_run=lambda state: self.link.can_run(has_begun=state.num_tokens > 0),
        )
        for request in requests:
            if request.state.status is RequestStatus.SENT:
                request.state.move(RequestStatus.UNSENT)
        return None if suspect is None else self._in_flight[suspect.request_id]

    def on_ready(self) -> None:
        """The next incarnation is ready and gets what waits, suspects one at a time."""
        self.take_over(self)

    def take_over(self, requests: Iterable[InFlightRequest]) -> None:
        """Requests of this engine that no engine has: it gets those that are to be sent, if it is up."""
        if self.link.is_up:
            waiting = [request.state for request in requests if request.state.status is RequestStatus.UNSENT]
            for state in self._resumption.take(waiting):
                self.resume(self._in_flight[state.request_id])

    def check(self) -> None:
        """Assert what holds between the link, the statuses of this engine's requests and the resumption."""
        requests = list(self)
        assert len(requests) == self.num_in_flight, (len(requests), self.num_in_flight)
        assert sum(request.work for request in requests) == self.work, self.work
        assert not (requests and self.link.is_dead), "an engine that is dead for good has requests"
        unsent = {request.state for request in requests if request.state.status is RequestStatus.UNSENT}
        has_any = any(request.state.status in (RequestStatus.SENT, RequestStatus.ABORTING) for request in requests)
        suspects, on_trial = self._resumption.suspects, self._resumption.on_trial
        if self.link.is_up:
            assert unsent == set(suspects), "what is not sent waits for a trial"
            assert on_trial is not None or not suspects, "suspects wait, and none is tried"
        else:
            assert not has_any and not suspects and on_trial is None, "a dead engine has no requests"  # noqa: PT018
        if on_trial is not None:
            assert on_trial.status in (RequestStatus.SENT, RequestStatus.ABORTING), on_trial.status


def make_blame(suspect: InFlightRequest, reason: str) -> EngineGenerateError:
    """What the reader of a request gets that engines die of."""
    return EngineGenerateError(
        f"engines die of this request: {suspect.state.num_deaths} did without a token of it, at last with no other "
        f"request to blame: {reason}"
    )


def _make_resumed(request: InFlightRequest, now_s: float) -> EngineCoreRequest:
    """What lets another incarnation go on with a request, after the tokens that were delivered."""
    state, message = request.state, request.state.request
    deadline_s = message.deadline_s
    if deadline_s is not None:
        # Without meaning once something was computed.
        deadline_s = None if state.num_tokens else max(0.0, deadline_s - (now_s - request.counted_from_s))
    return msgspec.structs.replace(
        message,
        prompt_token_ids=list(message.prompt_token_ids),  # a session's list grows
        output_token_ids=list(state.token_ids),
        num_earlier_tokens=state.num_tokens - len(state.token_ids),
        deadline_s=deadline_s,
    )


def _count_tokens(message: EngineCoreRequest | Continue) -> int:
    """Tokens that an engine has to compute before the next one of the answer, if none of them is in its cache."""
    if isinstance(message, Continue):
        return len(message.token_ids)
    return len(message.prompt_token_ids) + len(message.output_token_ids)
