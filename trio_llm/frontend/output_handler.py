"""OutputHandler: the one task that reads what the engine says and gives it to the requests' mailboxes.

Runs in the nursery of `open_llm`. Whatever one request's output does, the task goes on; only the engine's end ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from trio_llm.errors import CodecError, EngineDeadError, EngineGenerateError, InvalidRequestError
from trio_llm.frontend.admission import AdmissionLedger
from trio_llm.frontend.collector import RepeatingCollector, RequestOutputCollector
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.output_processor import OutputGap, OutputProcessor, ProcessedRow, RequestState
from trio_llm.frontend.statistics.iteration import RequestClock, StatisticsRecorder
from trio_llm.frontend.text.parallel_sampling import Family, fan_out
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.wire.messages import (
    Abort,
    Ack,
    Continue,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromEngine,
    Progress,
    Ready,
    UtilityResult,
)

__all__ = ["LiveRequest", "OutputHandler", "OutputHandlerHooks"]

logger = logging.getLogger(__name__)

_SLICE_ROWS: Final = 128
"""Rows handled between two schedule points, so that a large batch does not keep other tasks waiting."""
_MAX_EXPIRED: Final = 2
"""After so many deadlines that passed while the reader stayed, a request is sent without one."""
_MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Of memory, for one choice of a request: about ten thousand tokens that nobody reads."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A registered request with its mailbox and its clock. With n > 1 there is one a choice; all share the mailbox."""

    state: RequestState
    collector: RequestOutputCollector
    clock: RequestClock


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHandlerHooks:
    """What the handler tells its owner. Synchronous."""

    on_sign_of_life: Callable[[], None]
    on_progress: Callable[[Progress], None]
    on_ready: Callable[[Ready], None]
    on_utility_result: Callable[[UtilityResult], None]
    on_dead: Callable[[EngineDeadError], None]
    on_request_gone: Callable[[], None]


class OutputHandler:
    """Drains the core client.

    Args:
        ledger: is kept here.
        ack_steps: tell the engine how far this front end has come each so many steps.
    """

    def __init__(
        self,
        core: CoreClient,
        recorder: StatisticsRecorder,
        hooks: OutputHandlerHooks,
        *,
        ledger: AdmissionLedger,
        ack_steps: int,
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._hooks = hooks
        self._ledger = ledger
        self._ack_steps = ack_steps
        self._acknowledged = 0
        self._rows_since_checkpoint = 0
        self._requests: dict[RequestState, LiveRequest] = {}
        self.processor: OutputProcessor | None = None
        """Set by the owner when the model is ready; no row comes before."""

    @property
    def num_unfinished(self) -> int:
        """Requests the engine may still work for, those whose reader has left included."""
        return len(self._requests)

    async def run(self) -> None:
        """Until the engine is dead for good.

        Cancellation: between two slices; what was taken by then is lost, as is the engine.
        """
        while True:
            try:
                messages = await self._core.receive()
            except EngineDeadError as error:
                self.give_up(error)
                return
            self._hooks.on_sign_of_life()
            for message in messages:
                await self._take(message)
            self._acknowledge(messages)
            self._recorder.flush()

    # --------------------------------------------------------------------------------- registration

    def submit(self, request: EngineCoreRequest, external_id: str, arrived_s: float) -> LiveRequest:
        """Register and queue what the engine has to compute for a request, which may ask for several choices.

        Synchronous: everything is registered before anything is sent, and all of it is queued or nothing is left.

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
        lives: list[LiveRequest] = []
        for index, child in enumerate(children):
            state = self.processor.add(child, external_id, index=index, family=family)
            lives.append(LiveRequest(state, collector, RequestClock(arrived_s)))
            self.register(lives[-1])
        sent: list[str] = []
        try:
            for child in children:
                self._core.send_nowait(child)
                sent.append(child.request_id)
        except CodecError as error:
            for live in lives:
                self.unregister(live.state)
            if sent:
                self._core.send_nowait(Abort(sent))
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        return lives[0]

    def open_session(
        self, request: EngineCoreRequest, external_id: str, collector: RequestOutputCollector, arrived_s: float
    ) -> LiveRequest:
        """Register a session that has no input yet. Synchronous; nothing is sent. Its parameters are the first ones."""
        assert self.processor is not None
        live = LiveRequest(self.processor.add(request, external_id), collector, RequestClock(arrived_s))
        self.register(live)
        return live

    def send_input(
        self,
        session: LiveRequest,
        request: EngineCoreRequest,
        message: EngineCoreRequest | Continue,
        *,
        num_input_tokens: int,
    ) -> None:
        """Send a session's next input. Synchronous; does nothing if the session is over.

        Args:
            request: with all tokens before the answer.
            message: what tells the engine of it.
            num_input_tokens: of all inputs so far, this one included.

        Raises:
            InvalidRequestError: it has no form on the wire.
        """
        state = session.state
        if self.processor is None or state.is_tombstone or state not in self._requests:
            return
        try:
            self._core.send_nowait(message)
        except CodecError as error:
            raise InvalidRequestError(f"the input cannot be sent to the engine: {error}") from error
        if session.clock.first_token_s is None:
            self._ledger.add(state, num_input_tokens)
        else:
            self._recorder.more_prompt_tokens(num_input_tokens - state.num_prompt_tokens)
        self.processor.begin_answer(state, request, num_input_tokens=num_input_tokens)

    def end_session(self, session: LiveRequest, reason: FinishReason) -> RequestOutput | None:
        """No input follows: the engine forgets the session. Synchronous.

        Returns:
            The last output for its reader; None if it was over before.
        """
        state = session.state
        if self.processor is None or not self.processor.bury(state):
            return None
        self._recorder.request_finished(state, session.clock, reason)
        self._core.send_nowait(Abort([state.request.request_id]))
        return self.processor.end_session(state, reason)

    def register(self, request: LiveRequest) -> None:
        """Before it is sent, so that no row can come for an unknown request."""
        self._requests[request.state] = request
        self._ledger.add(request.state, request.state.num_prompt_tokens)

    def unregister(self, state: RequestState) -> None:
        """Forget a request that was never sent."""
        assert self.processor is not None
        self.processor.remove(state)
        self._forget(state)

    def leave(self, request: LiveRequest) -> None:
        """The reader goes: its mailbox closes, and the engine is told what is unfinished. Synchronous.

        With n > 1, `request` may be any of the choices: all end.
        """
        request.collector.close()
        aborted: list[str] = []
        self._bury_family(request.state, aborted)
        if aborted:
            self._core.send_nowait(Abort(aborted))

    def resubmit(self, request: LiveRequest, seconds_left: float | None) -> None:
        """Send again what the engine has dropped, uncomputed, of a request that is read on. Synchronous.

        Args:
            seconds_left: until nobody reads. Not heeded once it was wrong twice: each time costs the request its turn.
        """
        request.collector.must_resubmit = False
        assert self.processor is not None
        for state in self.processor.family_of(request.state):
            if state.is_dropped and not state.is_tombstone and state in self._requests:
                state.is_dropped = False
                deadline_s = seconds_left if state.num_expired < _MAX_EXPIRED else None
                state.request = msgspec.structs.replace(state.request, deadline_s=deadline_s)
                self._core.send_nowait(state.request)

    def abort(self, external_id: str) -> int:
        """End requests on demand; their readers get what was held back, finished by `abort`. Synchronous.

        Returns how many readers there were: with n > 1, all choices have one.
        """
        if self.processor is None:
            return 0
        ids_of_reader: dict[RequestOutputCollector, list[str]] = {}
        for state in self.processor.states_of(external_id):
            request = self._requests[state]
            output = self.processor.finish(state)
            if output is not None:
                request.collector.put(output)
            self.processor.bury(state)
            self._recorder.request_finished(state, request.clock, "abort")
            ids_of_reader.setdefault(request.collector, []).append(state.request.request_id)
        for ids in ids_of_reader.values():
            self._core.send_nowait(Abort(ids))
        return len(ids_of_reader)

    # ------------------------------------------------------------------------------------- messages

    async def _take(self, message: FromEngine) -> None:
        match message:
            case EngineCoreOutputs():
                await self._take_outputs(message)
            case Progress():
                self._hooks.on_progress(message)
            case Ready():
                self._hooks.on_ready(message)
            case _:
                pass  # Heartbeat: any message is a sign of life. EngineDead: the core client has read it.

    async def _take_outputs(self, message: EngineCoreOutputs) -> None:
        now_s = trio.current_time()
        if message.stats is not None:
            self._recorder.scheduler(message.stats)
        if self.processor is not None:
            self.processor.weight_version = message.weight_version
        for result in message.utility_results:
            self._hooks.on_utility_result(result)
        aborted: list[str] = []
        for row in message.outputs:
            assert self.processor is not None, "no request was sent before the model was ready"
            try:
                processed = self.processor.process(row)
            except OutputGap as gap:
                self._core.kill(f"a message of the engine was lost: {gap}")
                break
            if processed is not None:
                self._deliver(processed, aborted, now_s)
            # Naming a prompt token's alternatives is work like that of a row.
            self._rows_since_checkpoint += 1 if row.prompt_logprobs is None else len(row.prompt_logprobs)
            if self._rows_since_checkpoint >= _SLICE_ROWS:
                self._rows_since_checkpoint = 0
                await trio.lowlevel.checkpoint()
        if aborted:
            self._core.send_nowait(Abort(aborted))

    def _deliver(self, row: ProcessedRow, aborted: list[str], now_s: float) -> None:
        request = self._requests[row.state]
        if row.num_new_tokens:
            if request.clock.first_token_s is None:
                self._ledger.has_first_token(row.state)
            self._recorder.tokens(row.state, request.clock, row.num_new_tokens, now_s)
        unread_bytes = request.collector.put(row.output) if row.output is not None else 0
        if row.is_dropped:
            request.collector.must_resubmit = True
            request.collector.put(_wake_up(row.state))
        if row.error is not None:
            # A cause is a bug of ours: its traceback is all there is to find it by.
            logger.warning("request %s failed: %s", row.state.external_id, row.error, exc_info=row.error.__cause__)
            request.collector.put_error(row.error)
            self._bury_family(row.state, aborted)
        if row.finish_reason is not None:
            self._recorder.request_finished(row.state, request.clock, row.finish_reason)
        elif unread_bytes > _MAX_UNREAD_BYTES * (1 if row.state.family is None else len(row.state.family.child_ids)):
            self._give_up_on_reader(request, unread_bytes, aborted)
        if row.must_abort:
            aborted.append(row.state.request.request_id)
        if row.is_gone:
            self._forget(row.state)

    def _give_up_on_reader(self, request: LiveRequest, unread_bytes: int, aborted: list[str]) -> None:
        request.collector.put_error(
            EngineGenerateError(
                f"{unread_bytes} bytes of output were not read, the limit is {_MAX_UNREAD_BYTES} for each choice"
            )
        )
        self._bury_family(request.state, aborted)

    def _bury_family(self, state: RequestState, aborted: list[str]) -> None:
        """Nobody reads this request and the other choices any more: those that are not over end, and join `aborted`."""
        if self.processor is None:
            return
        for member in self.processor.family_of(state):
            if self.processor.bury(member):
                self._recorder.request_finished(member, self._requests[member].clock, "abort")
                aborted.append(member.request.request_id)

    def _acknowledge(self, messages: list[FromEngine]) -> None:
        steps = [message.step for message in messages if isinstance(message, EngineCoreOutputs)]
        if steps and steps[-1] - self._acknowledged >= self._ack_steps:
            self._acknowledged = steps[-1]
            self._core.send_nowait(Ack(self._acknowledged))

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state, None)
        self._ledger.remove(state)
        self._hooks.on_request_gone()

    def give_up(self, error: EngineDeadError) -> None:
        """The engine is gone: every reader gets the text it is owed, then the error. Synchronous; once."""
        self._hooks.on_dead(error)
        for state, request in self._requests.items():
            if not state.is_tombstone:
                # One exception object must not be raised in many tasks: each would add its own traceback.
                request.collector.put_error(type(error)(*error.args))
                self._recorder.request_finished(state, request.clock, "error")
        self._requests.clear()
        self._ledger.clear()
        if self.processor is not None:
            self.processor.clear()
        self._recorder.engine_gone()
        self._recorder.flush()
        self._hooks.on_request_gone()


def _wake_up(state: RequestState) -> RequestOutput:
    """An output without a choice: the reader looks at its request, and does not pass it on."""
    return RequestOutput(state.external_id, state.num_prompt_tokens, state.num_cached_tokens, [], False)
