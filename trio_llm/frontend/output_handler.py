"""OutputHandler: the task that drains one engine's messages and puts what is in them into the requests' mailboxes.

Runs in the nursery of `open_llm`, one per engine. Whatever one request's output does, the task goes on; only the end of
the engine's last incarnation ends it.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.kv_events import KVEventHub
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.output_processor import OutputGap, ProcessedRow
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.outputs import RequestOutput
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreOutputs

__all__ = ["OutputHandler"]

logger = logging.getLogger(__name__)

_MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Memory of unread output for one choice of a request: about ten thousand tokens."""


class OutputHandler:
    """Delivers one engine's rows.

    Args:
        chunk_size: rows handled between two schedule points, so that a large batch does not keep other tasks waiting.
    """

    def __init__(
        self,
        engine: Engine,
        registry: RequestRegistry,
        recorder: StatisticsRecorder,
        kv_events: KVEventHub,
        chunk_size: int,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._requests = registry.engines[engine.index]
        self._recorder = recorder
        self._engine_recorder = recorder.engines[engine.index]
        self._kv_events = kv_events
        self._chunk_size = chunk_size
        self._slice_rows = 0
        """Rows since the last schedule point."""
        self._aborted: list[RequestState] = []
        """Requests that rows of the present message have ended for their readers, but not in the engine."""

    async def run(self) -> None:
        """Deliver until the engine is dead for good.

        Cancellation: between two slices; what was taken by then is lost, as is the engine.
        """
        engine, recorder = self._engine, self._recorder
        while True:
            try:
                messages = await engine.core.receive()
            except EngineDeadError as error:
                engine.die(error)
                recorder.flush()
                return
            self._slice_rows = 0
            engine.monitor.record_life()
            for message in messages:
                outputs = engine.take(message)
                if outputs is not None:
                    await self._deliver_outputs(outputs)
            engine.acknowledge()
            recorder.flush()

    async def _deliver_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self._requests.others_work = message.stats.num_tokens_of_others
            if self._engine_recorder is not None:
                self._engine_recorder.message(message.stats, message.timestamp)
        if message.kv_events:
            self._kv_events.put(message)
        if message.outputs:
            await self._deliver_rows(message.outputs, message.weight_version, message.timestamp)
            if self._aborted:
                aborted, self._aborted = self._aborted, []
                self._registry.end_in_engine(aborted)

    async def _deliver_rows(self, rows: list[EngineCoreOutput], weight_version: str, engine_time_s: float) -> None:
        """The loop that every token passes: what nearly all rows need stands here, without further calls."""
        processor = self._registry.processor
        assert processor is not None, "no request was sent before the model was ready"
        processor.weight_version, processor.engine_time_s = weight_version, engine_time_s
        in_flight, process_delta = self._registry.in_flight, processor.process_delta
        recorder = self._engine_recorder
        counts_tokens = recorder is not None
        num_tokens, latencies_s = 0, []
        now_s = trio.current_time()
        num_rows, chunk_size = self._slice_rows, self._chunk_size
        for row in rows:
            if num_rows >= chunk_size:  # before a row: behind the last one, the wait for a message is a schedule point
                num_rows = 0
                await trio.lowlevel.checkpoint()
                # Rows of another engine may have been read meanwhile.
                processor.weight_version, processor.engine_time_s = weight_version, engine_time_s
            num_rows += 1
            request = in_flight.get(row.request_id)
            if request is None:
                pass  # harmless: an abort and the end may cross
            elif (output := process_delta(request.state, row)) is not None:
                if counts_tokens:
                    clock = request.clock
                    latencies_s.append(now_s - clock.last_token_s)
                    clock.last_token_s = now_s
                    num_tokens += len(row.new_token_ids)
                unread_bytes = request.collector.put(output)
                if unread_bytes > _MAX_UNREAD_BYTES:
                    self._check_unread(request, unread_bytes)
            else:
                try:
                    processed = processor.process(request.state, row)
                except OutputGap as gap:
                    self._engine.distrust(f"a message of the engine was lost: {gap}")
                    break
                if processed is not None:
                    self._deliver(request, processed, now_s)
                if row.prompt_logprobs is not None:
                    num_rows += len(row.prompt_logprobs)  # to name a token's alternatives is work like that of a row
        self._slice_rows = num_rows
        if recorder is not None and latencies_s:
            recorder.tokens_of_message(num_tokens, latencies_s)

    def _deliver(self, request: InFlightRequest, row: ProcessedRow, now_s: float) -> None:
        """Deliver a row that is not merely tokens amid an answer."""
        registry, state = self._registry, request.state
        if row.num_new_tokens:
            registry.record_tokens(request, row.num_new_tokens, now_s)
        if row.is_pooled:
            registry.record_vector(request, now_s)
        if row.finish_reason is not None:
            registry.with_metrics(request, row.output)
        unread_bytes = request.collector.put(row.output) if row.output is not None else 0
        if row.is_expired:
            registry.mark_expired(request)
            request.collector.put(_make_wake_up(state))
        if row.error is not None:
            # A cause is a bug of ours: its traceback is all there is to find it by.
            logger.warning("request %s failed: %s", state.external_id, row.error, exc_info=row.error.__cause__)
            request.collector.put_error(row.error)
            self._aborted += registry.mark_family_aborted(state)
        if row.finish_reason is not None:
            registry.record_end(request, row.finish_reason)
        elif unread_bytes > _MAX_UNREAD_BYTES:
            self._check_unread(request, unread_bytes)
        if row.must_abort:
            self._aborted.append(state)
        if row.is_gone:
            registry.forget(state)

    def _check_unread(self, request: InFlightRequest, unread_bytes: int) -> None:
        """End a request if its reader has left more unread than is allowed."""
        family = request.state.family
        if family is not None and unread_bytes <= _MAX_UNREAD_BYTES * len(family.child_ids):
            return
        request.collector.put_error(
            EngineGenerateError(
                f"{unread_bytes} bytes of output were not read, the limit is {_MAX_UNREAD_BYTES} for each choice"
            )
        )
        self._aborted += self._registry.mark_family_aborted(request.state)


def _make_wake_up(state: RequestState) -> RequestOutput:
    """An output without a choice: the reader looks at its request, and does not pass it on."""
    return RequestOutput(state.external_id, state.num_prompt_tokens, state.num_cached_tokens, [], False)
