"""RequestRegistry: the unfinished requests of a front end, and all that the engines are sent for them.

Used by the submitter and by sessions, which bring requests, and by the output handler, which sees them end. Synchronous
throughout: a request is registered and queued for sending, or nothing of it is left. When an engine dies, its requests
stay, and another engine, or the next incarnation, gets them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import trio

from trio_llm.errors import CodecError, EngineDeadError, InvalidRequestError, fresh
from trio_llm.frontend.requests.admission import AdmissionLedger
from trio_llm.frontend.requests.balancing import ANYWHERE, Balancer, Routing
from trio_llm.frontend.requests.collector import RequestOutputCollector
from trio_llm.frontend.requests.engine_requests import EngineLink, EngineRequests
from trio_llm.frontend.requests.in_flight import InFlightRequest, make_choices
from trio_llm.frontend.requests.invariants import check_requests
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.parallel_sampling import fan_out
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.routing import EngineRouter, RequestRecovery
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.wire.messages import Continue, EngineCoreRequest

__all__ = ["RequestRegistry"]

_MAX_EXPIRED: Final = 2
"""After so many deadlines that passed while the reader stayed, a request is sent without one."""


class RequestRegistry:
    """All requests between their registration and their engine's last row for them.

    Args:
        engines: at least one, in the order of their indices.
        ledger: counts the requests that are in here.
        balancer: chooses the engines. None: one with its defaults.
    """

    def __init__(
        self,
        engines: Sequence[EngineLink],
        recorder: StatisticsRecorder,
        ledger: AdmissionLedger,
        *,
        balancer: Balancer | None = None,
    ) -> None:
        self.in_flight: dict[str, InFlightRequest] = {}
        """By internal id, in order of arrival. Changed in here alone."""
        self.engines = [
            EngineRequests(link, of_engine, self.in_flight, counts_work=len(engines) > 1)
            for link, of_engine in zip(engines, recorder.engines, strict=True)
        ]
        self._recorder = recorder
        self._ledger = ledger
        self._idle_waiters = trio.lowlevel.ParkingLot()
        self._router = EngineRouter(self.engines, balancer or Balancer(len(engines)), self.in_flight)
        self.recovery = RequestRecovery(self.engines, self._router, self)
        self.processor: OutputProcessor | None = None
        """Set by the owner when the model is ready; no request comes before."""

    def __len__(self) -> int:
        """Requests that engines may still work for, those whose reader has left included."""
        return len(self.in_flight)

    def num_expected(self, engine_index: int) -> int:
        """Requests that this engine has and owes an answer."""
        return self.engines[engine_index].num_expected

    def num_in_flight(self, engine_index: int) -> int:
        """Requests of this engine, those whose reader has left included."""
        return self.engines[engine_index].num_in_flight

    def check_admission(self) -> None:
        """Return if one more request may be registered. Raises as `AdmissionLedger.check`."""
        self._ledger.check()

    def check_routing(self, routing: Routing) -> None:
        """Raises InvalidRequestError: it cannot be, or not with the engines of this front end."""
        self._router.check_routing(routing)

    def check(self) -> None:
        """Assert all that holds between statuses, ledger, families and resumption whenever no method is running."""
        check_requests(self.in_flight)
        self._ledger.check_counts(request.state for request in self.in_flight.values())
        for engine in self.engines:
            engine.check()
        self._router.check()

    # -------------------------------------------------------------------------------------- arriving

    def submit(self, request: EngineCoreRequest, report: RequestReport, routing: Routing = ANYWHERE) -> InFlightRequest:
        """Register a request, which may ask for several choices, and queue all of it for an engine or leave nothing.

        Returns:
            The request, with n > 1 its first child: it stands for the whole answer.

        Raises:
            OverloadedError: as much is unfinished as may be.
            EngineUnavailableError: the engine that it asks for is dead for good, and others are not.
            InvalidRequestError: it has no form on the wire, or more choices than may ever be unfinished.
        """
        assert self.processor is not None
        children = fan_out(request) if request.params.n > 1 else [request]
        self._ledger.check(count=len(children), num_prompt_tokens=len(request.prompt_token_ids))
        engine_index = self._router.choose(routing, request.prompt_token_ids, request.cache_salt)
        choices = make_choices(request, children, self.processor, report, engine_index, routing)
        for choice in choices:
            self.register(choice)
        try:
            self.engines[engine_index].send_all(choices)
        except CodecError as error:
            for choice in choices:
                self.drop(choice)
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        return choices[0]

    def register(self, request: InFlightRequest) -> None:
        """Before it is sent, so that no row can come for an unknown request."""
        self.in_flight[request.state.request_id] = request
        self.engines[request.engine_index].add(request)
        self._ledger.add(request.state, request.state.num_prompt_tokens)

    def resubmit(self, request: InFlightRequest, seconds_left: float | None) -> None:
        """Send again what the engine has dropped, uncomputed, because the deadline at the time had passed.

        Args:
            seconds_left: the reader's new deadline; None: it has none. It is left out once two deadlines have passed
                like this: each costs the request its place in the engine's queue.
        """
        request.collector.must_resubmit = False
        for member in self._members(request.state):
            state = member.state
            if state.status is RequestStatus.EXPIRED:
                deadline_s = seconds_left if state.num_expired < _MAX_EXPIRED else None
                state.request = msgspec.structs.replace(state.request, deadline_s=deadline_s)
                member.counted_from_s = trio.current_time()
                engine = self.engines[member.engine_index]
                engine.send(member, state.request)
                engine.count_work(member)

    # -------------------------------------------------------------------------------------- sessions

    def open_session(
        self,
        request: EngineCoreRequest,
        collector: RequestOutputCollector,
        report: RequestReport,
        routing: Routing = ANYWHERE,
    ) -> InFlightRequest:
        """Register a session, which has no input yet. Nothing is sent."""
        assert self.processor is not None
        state = self.processor.make_state(request, report.external_id)
        engine_index = self._router.choose(routing, [], request.cache_salt)
        clock = RequestClock(report.arrived_s)
        session = InFlightRequest(state, collector, clock, report, engine_index, routing)
        self.register(session)
        return session

    def queue_input(self, session: InFlightRequest, num_tokens: int, on_admitted: Callable[[], None]) -> None:
        """Ask for room for a session's next input; see `AdmissionLedger.queue_input`.

        If the session is over, `on_admitted` is never called: its mailbox has ended the task that would wait for that.
        """
        if session.is_unfinished:
            self._ledger.queue_input(session.state, num_tokens, on_admitted)

    def send_input(
        self,
        session: InFlightRequest,
        message: EngineCoreRequest | Continue,
        *,
        token_ids: list[int],
        num_input_tokens: int,
    ) -> None:
        """Send a session's next input, for which there is room. Does nothing if the session is over.

        Arguments and errors: as `EngineRequests.send_input`.
        """
        if session.is_unfinished:
            assert self.processor is not None
            self.engines[session.engine_index].send_input(
                session, message, processor=self.processor, token_ids=token_ids, num_input_tokens=num_input_tokens
            )

    def end_session(self, session: InFlightRequest, reason: FinishReason) -> RequestOutput | None:
        """No input follows: the engine forgets the session. Returns the last output; None if it was over before."""
        if not session.is_unfinished:
            return None
        assert self.processor is not None
        output = self.with_metrics(session, self.processor.end_session(session.state, reason))
        self.end_in_engine(self.mark_family_aborted(session.state, reason=reason))
        return output

    # --------------------------------------------------------------------------------------- leaving

    def leave(self, request: InFlightRequest) -> None:
        """The reader goes: its mailbox closes, and the engine is sent one abort for what is unfinished.

        With n > 1, `request` may be any of the choices: all end.
        """
        request.collector.close()
        self.end_in_engine(self.mark_family_aborted(request.state))

    def abort(self, external_id: str) -> int:
        """End requests on demand; their readers get what was held back, with the finish reason `abort`.

        Returns how many readers there were: with n > 1, all choices have one.
        """
        states_of_reader: dict[RequestOutputCollector, list[RequestState]] = {}
        for request in list(self.in_flight.values()):
            if request.state.external_id != external_id or not request.is_unfinished:
                continue
            assert self.processor is not None
            output = self.with_metrics(request, self.processor.finish(request.state))
            if output is not None:
                request.collector.put(output)
            states = states_of_reader.setdefault(request.collector, [])
            if self._mark_aborted(request, "abort"):
                states.append(request.state)
        for states in states_of_reader.values():
            self.end_in_engine(states)
        return len(states_of_reader)

    def mark_family_aborted(self, state: RequestState, *, reason: FinishReason = "abort") -> list[RequestState]:
        """This request and the other choices of its answer are over for their reader.

        `reason` is what this one counts with; the others count as aborted. Returns those that were not over and that an
        engine has, for `end_in_engine`.
        """
        return [
            member.state
            for member in self._members(state)
            if member.is_unfinished and self._mark_aborted(member, reason if member.state is state else "abort")
        ]

    def end_in_engine(self, states: Iterable[RequestState]) -> None:
        """Let the engines forget requests that are marked as aborted: one message to each engine."""
        ids_of_engine: dict[int, list[str]] = {}
        for state in states:
            if state.status is RequestStatus.ABORTING:
                engine_index = self.in_flight[state.request_id].engine_index
                ids_of_engine.setdefault(engine_index, []).append(state.request_id)
        for engine_index, request_ids in ids_of_engine.items():
            self.engines[engine_index].abort(request_ids)

    def _mark_aborted(self, request: InFlightRequest, reason: FinishReason) -> bool:
        """The request is over for its reader. Returns whether its engine has it; if not, the request is gone."""
        self.record_end(request, reason)
        if request.state.num_tokens_when_sent is None:
            self.drop(request)
            return False
        request.state.move(RequestStatus.ABORTING)
        self.engines[request.engine_index].count_work(request)
        return True

    def drop(self, request: InFlightRequest) -> None:
        """Forget a request that no row will come for."""
        request.state.move(RequestStatus.GONE)
        self.forget(request.state)
        self._recorder.flush()  # no message of the engine follows that would

    def forget(self, state: RequestState) -> None:
        """The request is gone: the engine's last row for it has come."""
        request = self.in_flight.pop(state.request_id)
        self.engines[request.engine_index].remove(request)
        self._ledger.remove(state)
        self._wake_idle_waiters()
        if state.num_deaths:
            self.clear_suspicion(request)

    def _members(self, state: RequestState) -> list[InFlightRequest]:
        """The unforgotten requests for the choices of one answer: this one, and with n > 1 the others."""
        ids = [state.request_id] if state.family is None else state.family.child_ids
        return [request for request_id in ids if (request := self.in_flight.get(request_id)) is not None]

    # ------------------------------------------------------------------------------------------ rows

    def record_tokens(self, request: InFlightRequest, count: int, now_s: float) -> None:
        """A row brought tokens for the reader: count them, and do what follows from an answer's first ones."""
        if not request.has_first_token:
            self.mark_first_token(request)
        if request.state.num_deaths:
            self.clear_suspicion(request)
        self.engines[request.engine_index].record_tokens(request, count, now_s)

    def record_vector(self, request: InFlightRequest, now_s: float) -> None:
        """A row brought the vector of a pooling request."""
        self.engines[request.engine_index].record_vector(request, now_s)

    def with_metrics(self, request: InFlightRequest, output: RequestOutput | None) -> RequestOutput | None:
        """Let the last output of an answer tell how long it took. Returns the output."""
        return self.engines[request.engine_index].with_metrics(request, output)

    def record_end(self, request: InFlightRequest, reason: FinishReason) -> None:
        """The request is over for its reader. Once per request."""
        self.engines[request.engine_index].record_end(request, reason)

    def mark_first_token(self, request: InFlightRequest) -> None:
        """The first token of an answer has come: its prompt is computed."""
        request.has_first_token = True
        self.engines[request.engine_index].count_work(request)
        self._ledger.prefill_done(request.state)

    def mark_expired(self, request: InFlightRequest) -> None:
        """The engine has dropped it, uncomputed: it is sent again if its reader reads on."""
        request.collector.must_resubmit = True
        engine = self.engines[request.engine_index]
        engine.count_work(request)
        if request.state.num_deaths:  # the next suspect does not wait for this one's reader
            engine.finish_trial(request)

    def clear_suspicion(self, request: InFlightRequest) -> None:
        """A request that may have killed engines has got a token, or is over."""
        request.state.num_deaths = 0
        self.engines[request.engine_index].finish_trial(request)

    # -------------------------------------------------------------------------------------- the end

    def drop_all(self, engine: EngineLink, error: EngineDeadError) -> None:
        """No engine will go on with this one's requests: each reader gets the text it is owed, then the error."""
        for request in list(self.engines[engine.index]):
            if request.is_unfinished:
                request.collector.put_error(fresh(error))
                self.record_end(request, "error")
            request.state.move(RequestStatus.GONE)
            self.forget(request.state)

    async def wait_idle(self) -> None:
        """Wait until no request is unfinished, in the engines neither. Cancellation: safe."""
        await trio.lowlevel.checkpoint()
        while self.in_flight:
            await self._idle_waiters.park()

    def _wake_idle_waiters(self) -> None:
        if not self.in_flight:
            self._idle_waiters.unpark_all()
