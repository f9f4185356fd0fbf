"""EngineCore: the engine without its I/O. Messages go in, answers and tokens come out.

Owned by the loop, which feeds it from the link and sends what it returns. Imports no torch and no zmq, so that
tests drive it directly.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trio_llm.config import EngineConfig
from trio_llm.engine.control_calls import BETWEEN_STEPS, ControlCalls
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.outbox import Outbox
from trio_llm.engine.request_checks import find_input_problem, find_request_problem
from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step_budget import StepBudget
from trio_llm.engine.step_pipeline import StepPipeline
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
)

__all__ = ["EngineCore"]


class EngineCore:
    """Scheduler and executor behind the wire's messages.

    One turn of the loop is: `handle` what has arrived, send `take_answers()`, send `step()`.

    Args:
        executor: a loaded model.
        config: budget, sequences and credit.
        epoch, engine_index: which incarnation of which engine this is; put into every message.
        clock: seconds; for deadlines, for the time in messages, and to measure steps.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        epoch: int,
        engine_index: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._scheduler = Scheduler(SchedulerLimits.of(executor.info, config))
        self._kv_log = self._scheduler.kv_event_log
        self._pipeline = StepPipeline(
            executor,
            self._scheduler,
            run_ahead=_default_run_ahead(executor.info) if config.run_ahead is None else config.run_ahead,
            budget=_make_step_budget(executor.info, config),
            clock=clock,
        )
        self._outbox = Outbox(epoch=epoch, engine_index=engine_index, credit_steps=config.credit_steps)
        self._sealed: list[EngineCoreOutputs] = []
        """Messages that are complete and not taken yet."""
        self._control_calls = ControlCalls(
            executor, self._scheduler, num_sent=lambda: self._outbox.num_sent, profile_dir=config.profile_dir
        )

    def ready(self) -> Ready:
        """The message that opens this engine for requests."""
        return Ready(self._outbox.epoch, self._executor.info, self._outbox.engine_index)

    def heartbeat(self) -> Heartbeat:
        """The message that shows that the loop turns."""
        outbox = self._outbox
        return Heartbeat(outbox.epoch, outbox.num_sent, self._pipeline.num_retired, outbox.engine_index)

    @property
    def has_credit(self) -> bool:
        """The front end is close enough behind for another step."""
        return self._outbox.has_credit

    @property
    def is_busy(self) -> bool:
        """There is something to compute or to send now. False also when only an `Ack` can help."""
        may_plan = self._control_calls.state.may_step and self._scheduler.has_unfinished
        can_step = (may_plan or not self._pipeline.is_empty) and self.has_credit
        return can_step or self._has_content or bool(self._sealed)

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self._scheduler.stats()

    def handle(self, message: ToEngine) -> None:
        """Take one message. A bad message fails only its own request or call.

        Raises:
            Exception: the executor failed as a whole, in a step that a utility call had to wait for, or in the call.
        """
        match message:
            case EngineCoreRequest():
                self._add(message)
            case Continue():
                self._continue(message)
            case Abort():
                self._outbox.rows += [self._scheduler.abort(request_id) for request_id in message.request_ids]
            case Ack():
                self._outbox.acknowledge(message.step)
            case UtilityCall():
                self._call(message)

    def take_answers(self) -> list[EngineCoreOutputs]:
        """All that can be sent before the next step: answers to calls, confirmations of aborts, and the last rows of
        requests that were refused or have expired.

        To be sent before `step` is called, so that none of them waits for tokens. They need no credit.
        """
        if self.has_credit:
            self._outbox.rows += self._scheduler.take_expired(self._clock())
        self._outbox.utility_results += self._control_calls.settle()
        if self._has_content:
            # The counts of the last step were in the message of that step.
            stats = msgspec.structs.replace(self._scheduler.stats(), num_prompt_tokens=0, num_cached_tokens=0)
            self._sealed.append(self._seal(stats))
        answers, self._sealed = self._sealed, []
        return answers

    def step(self) -> EngineCoreOutputs | None:
        """Retire one step and return its message, or None if there is nothing to send.

        If we run ahead, the step after it is launched before. Without credit no tokens are computed.

        Raises:
            Exception: the executor failed as a whole; the engine cannot go on.
        """
        assert not self._sealed, "take_answers() comes first"
        had_steps = not self._pipeline.is_empty
        if self.has_credit:
            self._outbox.rows += self._pipeline.advance(may_plan=self._control_calls.state.may_step)
        self._outbox.utility_results += self._control_calls.settle()
        # A step that was in flight when the last sequence ended gives its blocks back only now.
        becomes_idle = had_steps and self._pipeline.is_empty and not self._scheduler.has_unfinished
        return self._seal(self._scheduler.stats()) if self._has_content or becomes_idle else None

    @property
    def _has_content(self) -> bool:
        return self._outbox.has_content or bool(self._kv_log)

    def _seal(self, stats: SchedulerStats) -> EngineCoreOutputs:
        control = self._control_calls.state
        if not control.may_step:
            level = control.sleep_state.level
            stats = msgspec.structs.replace(stats, num_deferred=stats.num_waiting, sleep_level=level)
        return self._outbox.seal(
            self._clock(),
            stats,
            kv_events=self._kv_log.take() if self._kv_log else [],
            weight_version=self._control_calls.state.weight_version,
        )

    # ------------------------------------------------------------------------------------- messages

    def _add(self, request: EngineCoreRequest) -> None:
        problem = find_request_problem(request, self._executor.info)
        if request.request_id in self._scheduler:
            problem = f"the engine already runs a request {request.request_id!r}"
        if problem:
            self._outbox.rows.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    start=request.num_earlier_tokens + len(request.output_token_ids),
                    new_token_ids=[],
                    finish_reason="error",
                    error=problem,
                )
            )
            return
        now_s = self._clock()
        self._scheduler.add(
            Sequence(
                request_id=request.request_id,
                token_ids=request.prompt_token_ids + request.output_token_ids,
                num_prompt_tokens=len(request.prompt_token_ids),
                params=request.params,
                priority=request.priority,
                arrived_s=now_s,
                expires_at=None if request.deadline_s is None else now_s + request.deadline_s,
                bad_words=request.bad_words_token_ids,
                # Prompt log-probabilities were sent before the first token was.
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
            self._outbox.rows.append(row)

    def _call(self, call: UtilityCall) -> None:
        if call.method in BETWEEN_STEPS:
            self._outbox.rows += self._pipeline.drain()
        if call.method == "update_weights" and self._outbox.rows:
            # Their tokens were computed by the old weights, and the message must say so.
            self._sealed.append(self._seal(self._scheduler.stats()))
        self._outbox.utility_results += self._control_calls.call(call)
        self._outbox.rows += self._control_calls.take_rows()


def _default_run_ahead(model: ModelConfig) -> int:
    """A GPU computes while the host plans the next step; a CPU has no time to gain."""
    return 1 if model.device.startswith("cuda") else 0


def _make_step_budget(model: ModelConfig, config: EngineConfig) -> StepBudget | None:
    if config.step_time_target_s == 0:
        return None
    return StepBudget(config.step_time_target_s, block_size=model.block_size, max_tokens=config.max_num_batched_tokens)
