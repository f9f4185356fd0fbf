"""OutputHandler: the one task that reads what the engine says and gives it to the requests' mailboxes.

Runs in the nursery of `open_llm`. Whatever one request's output does, the task goes on; only the engine's end ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.collector import RequestOutputCollector
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.output_processor import OutputGap, OutputProcessor, ProcessedRow, RequestState
from trio_llm.frontend.statistics.iteration import RequestClock, StatisticsRecorder
from trio_llm.wire.messages import (
    Abort,
    Ack,
    EngineCoreOutputs,
    FromEngine,
    Progress,
    Ready,
    UtilityResult,
)

__all__ = ["LiveRequest", "OutputHandler", "OutputHandlerHooks"]

logger = logging.getLogger(__name__)

_SLICE_ROWS: Final = 128
"""Rows handled between two schedule points, so that a large batch does not keep other tasks waiting."""
_MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Of memory, for one request: about ten thousand tokens that nobody reads."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A registered request with its mailbox and its clock."""

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
        ack_steps: tell the engine how far this front end has come each so many steps.
    """

    def __init__(
        self, core: CoreClient, recorder: StatisticsRecorder, hooks: OutputHandlerHooks, *, ack_steps: int
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._hooks = hooks
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

    def register(self, request: LiveRequest) -> None:
        """Before it is sent, so that no row can come for an unknown request."""
        self._requests[request.state] = request

    def unregister(self, state: RequestState) -> None:
        """Forget a request that was never sent."""
        assert self.processor is not None
        self.processor.remove(state)
        self._forget(state)

    def leave(self, request: LiveRequest) -> None:
        """The reader goes: its mailbox closes, and the engine is told unless the request is over. Synchronous."""
        request.collector.close()
        if self.processor is not None and self.processor.bury(request.state):
            self._recorder.request_finished(request.state, request.clock, "abort")
            self._core.send_nowait(Abort([request.state.request.request_id]))

    def abort(self, external_id: str) -> int:
        """End requests on demand; their readers get what was held back, finished by `abort`. Synchronous."""
        if self.processor is None:
            return 0
        states = self.processor.states_of(external_id)
        for state in states:
            request = self._requests[state]
            request.collector.put(self.processor.finish(state))
            self.processor.bury(state)
            self._recorder.request_finished(state, request.clock, "abort")
            self._core.send_nowait(Abort([state.request.request_id]))
        return len(states)

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
            self._rows_since_checkpoint += 1
            if self._rows_since_checkpoint >= _SLICE_ROWS:
                self._rows_since_checkpoint = 0
                await trio.lowlevel.checkpoint()
        if aborted:
            self._core.send_nowait(Abort(aborted))

    def _deliver(self, row: ProcessedRow, aborted: list[str], now_s: float) -> None:
        request = self._requests[row.state]
        if row.num_new_tokens:
            self._recorder.tokens(row.state, request.clock, row.num_new_tokens, now_s)
        unread_bytes = request.collector.put(row.output) if row.output is not None else 0
        if row.error is not None:
            # A cause is a bug of ours: its traceback is all there is to find it by.
            logger.warning("request %s failed: %s", row.state.external_id, row.error, exc_info=row.error.__cause__)
            request.collector.put_error(row.error)
        if row.finish_reason is not None:
            self._recorder.request_finished(row.state, request.clock, row.finish_reason)
        elif unread_bytes > _MAX_UNREAD_BYTES:
            self._give_up_on_reader(request, unread_bytes, aborted)
        if row.must_abort:
            aborted.append(row.state.request.request_id)
        if row.is_gone:
            self._forget(row.state)

    def _give_up_on_reader(self, request: LiveRequest, unread_bytes: int, aborted: list[str]) -> None:
        assert self.processor is not None
        request.collector.put_error(
            EngineGenerateError(f"{unread_bytes} bytes of output were not read, the limit is {_MAX_UNREAD_BYTES}")
        )
        if self.processor.bury(request.state):
            self._recorder.request_finished(request.state, request.clock, "abort")
            aborted.append(request.state.request.request_id)

    def _acknowledge(self, messages: list[FromEngine]) -> None:
        steps = [message.step for message in messages if isinstance(message, EngineCoreOutputs)]
        if steps and steps[-1] - self._acknowledged >= self._ack_steps:
            self._acknowledged = steps[-1]
            self._core.send_nowait(Ack(self._acknowledged))

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state, None)
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
        if self.processor is not None:
            self.processor.clear()
        self._recorder.engine_gone()
        self._recorder.flush()
        self._hooks.on_request_gone()
