"""EngineCore: the engine without its I/O. Messages go in, one step at a time comes out.

Owned by the loop, which feeds it from the link and sends what it returns. Imports no torch and no zmq, so that
tests drive it directly.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from trio_llm.config import EngineConfig
from trio_llm.engine.control_calls import BETWEEN_STEPS, ControlCalls
from trio_llm.engine.executor.base import Executor, LaunchedStep
from trio_llm.engine.request_checks import find_input_problem, find_request_problem
from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.wire.messages import (
    Abort,
    Ack,
    Continue,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Heartbeat,
    ModelConfig,
    Ready,
    SchedulerStats,
    ToEngine,
    UtilityCall,
    UtilityResult,
)

__all__ = ["EngineCore"]


class _Source(NamedTuple):
    """Whom messages come from."""

    epoch: int
    engine_index: int


class EngineCore:
    """Scheduler and executor behind the wire's messages.

    Args:
        executor: a loaded model.
        config: budget, sequences and credit.
        epoch, engine_index: which incarnation of which engine this is; put into every message.
    """

    def __init__(self, executor: Executor, config: EngineConfig, *, epoch: int, engine_index: int = 0) -> None:
        self._executor = executor
        self._scheduler = Scheduler(SchedulerLimits.of(executor.info, config))
        self._kv_log = self._scheduler.kv_event_log
        self._source = _Source(epoch, engine_index)
        self._run_ahead = _default_run_ahead(executor.info) if config.run_ahead is None else config.run_ahead
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        """Launched and not retired, the oldest first."""
        self._credit_steps = config.credit_steps
        self._num_sent = 0
        self._num_acknowledged = 0
        self._num_executed = 0
        self._rows: list[EngineCoreOutput] = []
        self._utility_results: list[UtilityResult] = []
        self._sealed: deque[EngineCoreOutputs] = deque()
        """Messages that are complete and not given out yet."""
        self._control_calls = ControlCalls(
            executor, self._scheduler, num_sent=lambda: self._num_sent, profile_dir=config.profile_dir
        )

    def ready(self) -> Ready:
        """The message that opens this engine for requests."""
        return Ready(self._source.epoch, self._executor.info, self._source.engine_index)

    def heartbeat(self) -> Heartbeat:
        """The message that says that the loop turns."""
        return Heartbeat(self._source.epoch, self._num_sent, self._num_executed, self._source.engine_index)

    @property
    def has_credit(self) -> bool:
        """The front end is close enough behind for another step."""
        return self._num_sent - self._num_acknowledged < self._credit_steps

    @property
    def is_busy(self) -> bool:
        """`step()` has something to do now. False also when only an `Ack` can help."""
        may_plan = self._control_calls.state.may_step and self._scheduler.has_unfinished
        return self._has_news or ((may_plan or bool(self._in_flight)) and self.has_credit)

    def handle(self, message: ToEngine, now_s: float) -> None:
        """Take one message in. What it gets wrong is its own error.

        Raises:
            Exception: the executor failed as a whole, in a step that a utility call had to wait for, or in the call.
        """
        match message:
            case EngineCoreRequest():
                self._add(message, now_s)
            case Continue():
                self._continue(message)
            case Abort():
                self._rows.extend(self._scheduler.abort(request_id) for request_id in message.request_ids)
            case Ack():
                self._num_acknowledged = min(max(self._num_acknowledged, message.step), self._num_sent)
            case UtilityCall():
                self._call(message, now_s)

    def step(self, now_s: float) -> EngineCoreOutputs | None:
        """Retire one step and return all there is to send, or None if there is nothing.

        If we run ahead, the step after it is launched before.

        Without credit no tokens are computed; confirmations, answers of utility calls and KV events still go out.

        Raises:
            Exception: the executor failed as a whole; the engine cannot go on.
        """
        if self._sealed:
            return self._sealed.popleft()
        if self.has_credit:
            self._rows.extend(self._scheduler.take_expired(now_s))
            plan = self._scheduler.schedule() if self._control_calls.state.may_step else None
            if plan:
                self._in_flight.append((plan, self._executor.launch(plan)))
            if self._in_flight and (plan is None or len(self._in_flight) > self._run_ahead):
                self._retire()
        self._utility_results += self._control_calls.settle()
        return self._seal(now_s) if self._has_news else None

    def _retire(self) -> None:
        oldest, launched = self._in_flight.popleft()
        self._rows.extend(self._scheduler.commit(oldest, launched.wait()))
        self._num_executed += 1

    def _seal(self, now_s: float) -> EngineCoreOutputs:
        """All there is to send, as one message."""
        rows, self._rows = self._rows, []
        results, self._utility_results = self._utility_results, []
        self._num_sent += 1
        return EngineCoreOutputs(
            epoch=self._source.epoch,
            engine_index=self._source.engine_index,
            step=self._num_sent,
            timestamp=now_s,
            outputs=rows,
            stats=self._scheduler.stats(),
            utility_results=results,
            kv_events=self._kv_log.take() if self._kv_log else [],
            weight_version=self._control_calls.state.weight_version,
        )

    @property
    def _has_news(self) -> bool:
        return bool(self._rows or self._utility_results or self._kv_log or self._sealed)

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self._scheduler.stats()

    # ------------------------------------------------------------------------------------- requests

    def _add(self, request: EngineCoreRequest, now_s: float) -> None:
        problem = find_request_problem(request, self._executor.info)
        if request.request_id in self._scheduler:
            problem = f"the engine already runs a request {request.request_id!r}"
        if problem:
            self._rows.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    start=request.num_earlier_tokens + len(request.output_token_ids),
                    new_token_ids=[],
                    finish_reason="error",
                    error=problem,
                )
            )
            return
        self._scheduler.add(
            Sequence(
                request_id=request.request_id,
                token_ids=request.prompt_token_ids + request.output_token_ids,
                num_prompt_tokens=len(request.prompt_token_ids),
                params=request.params,
                priority=request.priority,
                expires_at=None if request.deadline_s is None else now_s + request.deadline_s,
                bad_words=request.bad_words_token_ids,
                # They are out before the first token is.
                next_prompt_logprob=len(request.prompt_token_ids) if request.output_token_ids else 1,
                is_resumable=request.resumable,
                cache_root=salted(cache_salt=request.cache_salt),
                num_earlier_tokens=request.num_earlier_tokens,
                pooling=request.pooling_params,
            )
        )

    def _continue(self, message: Continue) -> None:
        problem = find_input_problem(message, self._executor.info)
        if row := self._scheduler.continue_session(message, problem):
            self._rows.append(row)

    # ------------------------------------------------------------------------------------ utilities

    def _call(self, call: UtilityCall, now_s: float) -> None:
        if call.method in BETWEEN_STEPS:
            while self._in_flight:
                self._retire()
        if call.method == "update_weights" and self._rows:
            # Computed by the old weights, and their message must say so.
            self._sealed.append(self._seal(now_s))
        self._utility_results += self._control_calls.call(call)
        self._rows += self._control_calls.take_rows()


def _default_run_ahead(info: ModelConfig) -> int:
    """A device of its own computes while we plan; a CPU would only be read later."""
    return 1 if info.device.startswith("cuda") else 0
