"""RequestRegistry: the unfinished requests of a front end, and all that the engine is told of them.

Used by `AsyncLLM` and sessions, which bring requests, and by the output handler, which sees them end. Synchronous
throughout: a request is registered and queued for sending, or nothing of it is left. When an engine dies, the requests
stay, and the next engine gets them from here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from trio_llm.errors import CodecError, EngineDeadError, EngineGenerateError, InvalidRequestError, fresh
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.requests.admission import AdmissionLedger
from trio_llm.frontend.requests.collector import RepeatingCollector, RequestOutputCollector
from trio_llm.frontend.requests.output_processor import OutputProcessor
from trio_llm.frontend.requests.parallel_sampling import Family, fan_out
from trio_llm.frontend.requests.resumption import Resumption
from trio_llm.frontend.requests.state import RequestState
from trio_llm.frontend.statistics.iteration import RequestClock, StatisticsRecorder
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.wire.codec import encode
from trio_llm.wire.messages import Abort, Continue, EngineCoreRequest, ToEngine

__all__ = ["InFlightRequest", "RequestRegistry"]

logger = logging.getLogger(__name__)

_MAX_EXPIRED: Final = 2
"""After so many deadlines that passed while the reader stayed, a request is sent without one."""


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A registered request with its mailbox and its clock. With n > 1 there is one a choice; all share the mailbox."""

    state: RequestState
    collector: RequestOutputCollector
    clock: RequestClock
    has_first_token: bool = False
    """Of its answer; of a session: of the newest one."""
    counted_from_s: float = 0.0
    """When the seconds of its deadline began; Trio's clock."""


class RequestRegistry:
    """All requests between their registration and the engine's last row for them.

    Args:
        ledger: is kept here.
        on_gone: is told each time that one is over, for the engine too.
    """

    def __init__(
        self, core: CoreClient, recorder: StatisticsRecorder, ledger: AdmissionLedger, on_gone: Callable[[], None]
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._ledger = ledger
        self._on_gone = on_gone
        self.by_state: dict[RequestState, InFlightRequest] = {}
        """In order of arrival. To be looked at."""
        self._resumption = Resumption[RequestState]()
        self._has_engine = True
        """False from an engine's death until the next one is ready: nothing is sent then, and everything after."""
        self.processor: OutputProcessor | None = None
        """Set by the owner when the model is ready; no request comes before."""

    def __len__(self) -> int:
        """Requests the engine may still work for, those whose reader has left included."""
        return len(self.by_state)

    @property
    def num_expected(self) -> int:
        """Requests that the engine has and owes an answer."""
        return sum(state.num_tokens_when_sent is not None and not state.is_idle for state in self.by_state)

    # -------------------------------------------------------------------------------------- arriving

    def submit(self, request: EngineCoreRequest, external_id: str, arrived_s: float) -> InFlightRequest:
        """Register and queue what the engine has to compute for a request, which may ask for several choices.

        Everything is registered before anything is sent, and all of it is queued or nothing is left.

        Returns:
            The request, with n > 1 its first child: it stands for the whole answer.

        Raises:
            InvalidRequestError: it has no form on the wire.
        """
        assert self.processor is not None
        kind, num_choices = request.params.output_kind, request.params.n
        children = fan_out(request)
        self._ledger.check(count=len(children), num_prompt_tokens=len(request.prompt_token_ids))
        family = Family([child.request_id for child in children], kind) if len(children) > 1 else None
        is_repeated = len(children) < num_choices
        collector = RepeatingCollector(kind, num_choices) if is_repeated else RequestOutputCollector(kind)
        lives: list[InFlightRequest] = []
        for index, child in enumerate(children):
            state = self.processor.add(child, external_id, index=index, family=family)
            clock = RequestClock(arrived_s)
            lives.append(InFlightRequest(state, collector, clock, counted_from_s=trio.current_time()))
            self.register(lives[-1])
        try:
            for live in lives:
                self._send_request(live, live.state.request)
        except CodecError as error:
            self.end_in_engine([live.state for live in lives if live.state.num_tokens_when_sent is not None])
            for live in lives:
                self._drop(live.state)
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        return lives[0]

    def register(self, request: InFlightRequest) -> None:
        """Before it is sent, so that no row can come for an unknown request."""
        self.by_state[request.state] = request
        self._ledger.add(request.state, request.state.num_prompt_tokens)

    def resubmit(self, request: InFlightRequest, seconds_left: float | None) -> None:
        """Send again what the engine has dropped, uncomputed, of a request that is read on.

        Args:
            seconds_left: until nobody reads. Not heeded once it was wrong twice: each time costs the request its turn.
        """
        request.collector.must_resubmit = False
        assert self.processor is not None
        for state in self.processor.family_of(request.state):
            if state.is_dropped and not state.is_tombstone and state in self.by_state:
                state.is_dropped = False
                deadline_s = seconds_left if state.num_expired < _MAX_EXPIRED else None
                state.request = msgspec.structs.replace(state.request, deadline_s=deadline_s)
                self.by_state[state].counted_from_s = trio.current_time()
                self._send_request(self.by_state[state], state.request)

    # -------------------------------------------------------------------------------------- sessions

    def open_session(
        self, request: EngineCoreRequest, external_id: str, collector: RequestOutputCollector, arrived_s: float
    ) -> InFlightRequest:
        """Register a session that has no input yet. Nothing is sent. Its parameters are the first ones."""
        assert self.processor is not None
        live = InFlightRequest(self.processor.add(request, external_id), collector, RequestClock(arrived_s))
        live.state.is_idle = True
        self.register(live)
        return live

    def queue_input(self, session: InFlightRequest, num_tokens: int, let_in: Callable[[], None]) -> None:
        """Ask for room for a session's next input; see `AdmissionLedger.queue_input`.

        If the session is over, `let_in` is never called: its mailbox has ended the task that would wait for that.
        """
        if self._is_unfinished(session.state):
            self._ledger.queue_input(session.state, num_tokens, let_in)

    def send_input(
        self,
        session: InFlightRequest,
        message: EngineCoreRequest | Continue,
        *,
        token_ids: list[int],
        num_input_tokens: int,
    ) -> None:
        """Send a session's next input, for which there is room. Does nothing if the session is over.

        Args:
            message: what tells the engine of it.
            token_ids: of all inputs and answers, this one included; may grow afterwards.
            num_input_tokens: of all inputs so far, this one included.

        Raises:
            InvalidRequestError: it has no form on the wire.
        """
        state = session.state
        if self.processor is None or not self._is_unfinished(state):
            return
        try:
            encode(message)
        except CodecError as error:
            raise InvalidRequestError(f"the input cannot be sent to the engine: {error}") from error
        session.has_first_token = False
        if session.clock.first_token_s is not None:
            self._recorder.more_prompt_tokens(num_input_tokens - state.num_prompt_tokens)
        self.processor.begin_answer(state, message, token_ids, num_input_tokens=num_input_tokens)
        if isinstance(message, Continue) and state.num_tokens_when_sent is None:
            # Another engine than the one that has the earlier inputs, or none yet.
            self._send_request(session, _resumed(session, trio.current_time()))
        else:
            self._send_request(session, message)

    def end_session(self, session: InFlightRequest, reason: FinishReason) -> RequestOutput | None:
        """No input follows: the engine forgets the session.

        Returns:
            The last output for its reader; None if it was over before.
        """
        state = session.state
        if self.processor is None or not self.processor.bury(state):
            return None
        self._recorder.request_finished(state, session.clock, reason)
        output = self.processor.end_session(state, reason)
        self.end_in_engine([state])
        return output

    # --------------------------------------------------------------------------------------- leaving

    def leave(self, request: InFlightRequest) -> None:
        """The reader goes: its mailbox closes, and the engine is told what is unfinished.

        With n > 1, `request` may be any of the choices: all end.
        """
        request.collector.close()
        self.end_in_engine(self.bury_family(request.state))

    def abort(self, external_id: str) -> int:
        """End requests on demand; their readers get what was held back, finished by `abort`.

        Returns how many readers there were: with n > 1, all choices have one.
        """
        if self.processor is None:
            return 0
        states_of_reader: dict[RequestOutputCollector, list[RequestState]] = {}
        for state in self.processor.states_of(external_id):
            request = self.by_state[state]
            output = self.processor.finish(state)
            if output is not None:
                request.collector.put(output)
            self.processor.bury(state)
            self._recorder.request_finished(state, request.clock, "abort")
            states_of_reader.setdefault(request.collector, []).append(state)
        for states in states_of_reader.values():
            self.end_in_engine(states)
        return len(states_of_reader)

    def bury_family(self, state: RequestState, *, reason: FinishReason = "abort") -> list[RequestState]:
        """Nobody reads this request and the other choices any more. Returns those that were not over, for
        `end_in_engine`.

        Args:
            reason: that this one counts with; the others are aborted.
        """
        if self.processor is None:
            return []
        ended = [member for member in self.processor.family_of(state) if self.processor.bury(member)]
        for member in ended:
            own_reason = reason if member is state else "abort"
            self._recorder.request_finished(member, self.by_state[member].clock, own_reason)
        return ended

    def end_in_engine(self, states: Iterable[RequestState]) -> None:
        """Nobody reads these any more: the engine is told, and its answers are waited for; those that it does not have
        are over now."""
        told: list[str] = []
        for state in states:
            if state.num_tokens_when_sent is None:
                self._drop(state)
            else:
                told.append(state.request.request_id)
        if told:
            self._core.send_nowait(Abort(told))

    def forget(self, state: RequestState) -> None:
        """The engine's last row for it has come."""
        self.by_state.pop(state, None)
        self._ledger.remove(state)
        self._on_gone()
        if state.num_deaths:
            self.is_cleared(state)

    def has_first_token(self, request: InFlightRequest) -> None:
        """The first token of an answer has come."""
        request.has_first_token = True
        self._ledger.has_first_token(request.state)

    def is_dropped(self, request: InFlightRequest) -> None:
        """The engine has dropped it, uncomputed: its reader may send it again."""
        request.state.num_tokens_when_sent = None
        request.collector.must_resubmit = True
        if request.state.num_deaths:  # whoever is to be tried next does not wait for a reader
            self._try_after(request.state)

    def _drop(self, state: RequestState) -> None:
        """Forget a request that the engine does not have."""
        assert self.processor is not None
        self.processor.remove(state)
        self.forget(state)
        self._recorder.flush()  # no message of the engine follows that would

    def _is_unfinished(self, state: RequestState) -> bool:
        """For its reader."""
        return state in self.by_state and not state.is_tombstone

    # ------------------------------------------------------------------------------ the engine's end

    def is_cleared(self, state: RequestState) -> None:
        """A request that engines have died of, perhaps, has got a token, or is over."""
        state.num_deaths = 0
        self._try_after(state)

    def _try_after(self, state: RequestState) -> None:
        """What waits for this one to be cleared is sent, if that is what it was."""
        for next_one in self._resumption.is_over(state):
            self._resume(next_one)

    def lose_engine(self, reason: str, *, could_run: Callable[[RequestState], bool]) -> None:
        """The engine is dead, and there will be another one: what is unfinished waits for that.

        Args:
            could_run: as `Resumption.engine_lost`.
        """
        self._has_engine = False
        culprit = self._resumption.engine_lost(self.by_state, could_run=could_run)
        for state in [state for state in self.by_state if state.is_tombstone]:
            self._drop(state)
        if culprit is not None and culprit in self.by_state:
            error = EngineGenerateError(
                f"engines die of this request: {culprit.num_deaths} did without a token of it, at last with no other "
                f"request to blame: {reason}"
            )
            logger.error("request %s is given up: %s", culprit.external_id, error)
            self.by_state[culprit].collector.put_error(error)
            self.end_in_engine(self.bury_family(culprit, reason="error"))
        self._recorder.engine_gone()

    def resume(self) -> None:
        """Another engine is ready: it gets all that is unfinished."""
        self._has_engine = True
        waiting = [state for state in self.by_state if not (state.is_idle or state.is_dropped)]
        for state in self._resumption.engine_ready(waiting):
            self._resume(state)

    def give_up(self, error: EngineDeadError) -> None:
        """There is no engine any more: every reader gets the text it is owed, then the error. Once."""
        for state, request in self.by_state.items():
            if not state.is_tombstone:
                request.collector.put_error(fresh(error))
                self._recorder.request_finished(state, request.clock, "error")
        self.by_state.clear()
        self._ledger.clear()
        if self.processor is not None:
            self.processor.clear()
        self._recorder.engine_gone()
        self._on_gone()

    # --------------------------------------------------------------------------------------- sending

    def _resume(self, state: RequestState) -> None:
        live = self.by_state[state]
        self._send_request(live, _resumed(live, trio.current_time()))

    def _send_request(self, live: InFlightRequest, message: EngineCoreRequest | Continue) -> None:
        """
        Raises:
            CodecError: it has no form on the wire.
        """
        self._send(message)
        if self._has_engine:
            live.state.num_tokens_when_sent = live.state.num_tokens

    def _send(self, message: ToEngine) -> None:
        if self._has_engine:
            self._core.send_nowait(message)
        else:
            encode(message)  # whoever asks gets the error now; `resume` sends it


def _resumed(live: InFlightRequest, now_s: float) -> EngineCoreRequest:
    """What lets another engine go on with a request, after the tokens that were delivered."""
    state, request = live.state, live.state.request
    deadline_s = request.deadline_s
    if deadline_s is not None:
        # Of no meaning once something was computed.
        deadline_s = None if state.num_tokens else max(0.0, deadline_s - (now_s - live.counted_from_s))
    return msgspec.structs.replace(
        request,
        prompt_token_ids=list(request.prompt_token_ids),  # a session's list grows
        output_token_ids=list(state.token_ids),
        num_earlier_tokens=state.num_tokens - len(state.token_ids),
        deadline_s=deadline_s,
    )
