"""OutputHandler: the one task that reads what the engine says and gives it to the requests' mailboxes.

Runs in the nursery of `open_llm`. Whatever one request's output does, the task goes on; only the end of the last engine
ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.core_client.base import CoreClient, EngineLost
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.output_processor import OutputGap, ProcessedRow
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.outputs import RequestOutput
from trio_llm.wire.messages import (
    Ack,
    EngineCoreOutputs,
    FromEngine,
    Heartbeat,
    Progress,
    Ready,
    UtilityResult,
)

__all__ = ["OutputHandler", "OutputHandlerHooks"]

logger = logging.getLogger(__name__)

_SLICE_ROWS: Final = 128
"""Rows handled between two schedule points, so that a large batch does not keep other tasks waiting."""
_MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Of memory, for one choice of a request: about ten thousand tokens that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHandlerHooks:
    """What the handler tells its owner. Synchronous."""

    on_sign_of_life: Callable[[], None]
    on_step: Callable[[], None]
    """The engine has computed something since the last time."""
    on_progress: Callable[[Progress], None]
    on_ready: Callable[[Ready], None]
    on_utility_result: Callable[[UtilityResult], None]
    on_lost: Callable[[EngineLost], None]
    on_kv_events: Callable[[EngineCoreOutputs], None]
    """The message has some."""
    on_dead: Callable[[EngineDeadError], None]


class OutputHandler:
    """Drains the core client.

    Args:
        ack_steps: tell the engine how far this front end has come each so many steps.
    """

    def __init__(
        self,
        core: CoreClient,
        requests: RequestRegistry,
        recorder: StatisticsRecorder,
        hooks: OutputHandlerHooks,
        *,
        ack_steps: int,
    ) -> None:
        self._core = core
        self._requests = requests
        self._recorder = recorder
        self._hooks = hooks
        self._ack_steps = ack_steps
        self._last_step = 0
        """Of this incarnation of the engine."""
        self._num_executed = 0
        self._acknowledged = 0
        self._is_distrusted = False
        """A message of this incarnation is missing: what comes after it is of no use."""
        self._rows_since_checkpoint = 0

    async def run(self) -> None:
        """Until the engine is dead for good.

        Cancellation: between two slices; what was taken by then is lost, as is the engine.
        """
        while True:
            try:
                messages = await self._core.receive()
            except EngineDeadError as error:
                self._hooks.on_dead(error)
                self._requests.give_up(error)
                self._recorder.flush()
                return
            self._hooks.on_sign_of_life()
            for message in messages:
                await self._take(message)
            self._acknowledge()
            self._recorder.flush()

    async def _take(self, message: FromEngine | EngineLost) -> None:
        match message:
            case EngineLost():
                self._hooks.on_lost(message)
            case EngineCoreOutputs():
                if self._is_complete(message.step - 1):
                    self._last_step = max(self._last_step, message.step)
                    await self._take_outputs(message)
            case Heartbeat():
                if self._is_complete(message.step) and message.num_executed > self._num_executed:
                    self._num_executed = message.num_executed
                    self._hooks.on_step()
            case Progress():
                self._hooks.on_progress(message)
            case Ready():
                self._last_step = self._acknowledged = self._num_executed = 0
                self._is_distrusted = False
                self._hooks.on_ready(message)
            case _:
                pass  # EngineDead: the core client has read it.

    def _is_complete(self, step: int) -> bool:
        """All messages up to this step were taken. If one is missing, the engine is ended: a token may be missing."""
        if step > self._last_step and not self._is_distrusted:
            self._distrust(f"message {self._last_step + 1} of the engine was lost")
        return not self._is_distrusted

    def _distrust(self, reason: str) -> None:
        self._is_distrusted = True
        self._core.kill(reason)

    async def _take_outputs(self, message: EngineCoreOutputs) -> None:
        now_s = trio.current_time()
        if message.stats is not None:
            self._recorder.engines[0].scheduler(message.stats)
        for result in message.utility_results:
            self._hooks.on_utility_result(result)
        if message.kv_events:
            self._hooks.on_kv_events(message)
        if message.outputs:
            self._hooks.on_step()
        processor = self._requests.processor
        if processor is not None:
            processor.weight_version = message.weight_version
        aborted: list[RequestState] = []
        for row in message.outputs:
            request = self._requests.in_flight.get(row.request_id)
            if request is None:
                pass  # harmless: an abort and the end may cross
            elif processor is not None and (output := processor.process_delta(request.state, row)) is not None:
                self._deliver_plain(request, output, aborted, now_s)
            else:
                assert processor is not None, "no request was sent before the model was ready"
                try:
                    processed = processor.process(request.state, row)
                except OutputGap as gap:
                    self._distrust(f"a message of the engine was lost: {gap}")
                    break
                if processed is not None:
                    self._deliver(request, processed, aborted, now_s)
            # Naming a prompt token's alternatives is work like that of a row.
            self._rows_since_checkpoint += 1 if row.prompt_logprobs is None else len(row.prompt_logprobs)
            if self._rows_since_checkpoint >= _SLICE_ROWS:
                self._rows_since_checkpoint = 0
                await trio.lowlevel.checkpoint()
        self._requests.end_in_engine(aborted)

    def _deliver_plain(
        self, request: InFlightRequest, output: RequestOutput, aborted: list[RequestState], now_s: float
    ) -> None:
        self._recorder.engines[0].tokens(request.clock, len(output.outputs[0].token_ids), now_s)
        unread_bytes = request.collector.put(output)
        if unread_bytes > _MAX_UNREAD_BYTES:
            self._check_unread(request, unread_bytes, aborted)

    def _deliver(self, request: InFlightRequest, row: ProcessedRow, aborted: list[RequestState], now_s: float) -> None:
        state = request.state
        if row.num_new_tokens:
            self._requests.record_tokens(request, row.num_new_tokens, now_s)
        if row.is_pooled:
            self._requests.record_vector(request)
        unread_bytes = request.collector.put(row.output) if row.output is not None else 0
        if row.is_expired:
            self._requests.mark_expired(request)
            request.collector.put(_wake_up(state))
        if row.error is not None:
            # A cause is a bug of ours: its traceback is all there is to find it by.
            logger.warning("request %s failed: %s", state.external_id, row.error, exc_info=row.error.__cause__)
            request.collector.put_error(row.error)
            aborted += self._requests.mark_family_aborted(state)
        if row.finish_reason is not None:
            self._requests.record_end(request, row.finish_reason)
        elif unread_bytes > _MAX_UNREAD_BYTES:
            self._check_unread(request, unread_bytes, aborted)
        if row.must_abort:
            aborted.append(state)
        if row.is_gone:
            self._requests.forget(state)

    def _check_unread(self, request: InFlightRequest, unread_bytes: int, aborted: list[RequestState]) -> None:
        """Give a reader up that has let more come together than may be."""
        family = request.state.family
        if family is not None and unread_bytes <= _MAX_UNREAD_BYTES * len(family.child_ids):
            return
        request.collector.put_error(
            EngineGenerateError(
                f"{unread_bytes} bytes of output were not read, the limit is {_MAX_UNREAD_BYTES} for each choice"
            )
        )
        aborted += self._requests.mark_family_aborted(request.state)

    def _acknowledge(self) -> None:
        if self._last_step - self._acknowledged >= self._ack_steps:
            self._acknowledged = self._last_step
            self._core.send_nowait(Ack(self._acknowledged))


def _wake_up(state: RequestState) -> RequestOutput:
    """An output without a choice: the reader looks at its request, and does not pass it on."""
    return RequestOutput(state.external_id, state.num_prompt_tokens, state.num_cached_tokens, [], False)
