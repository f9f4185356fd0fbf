"""EngineCore: the engine without its I/O. Messages go in, answers and tokens come out.

Owned by the loop, which feeds it from the link and sends what it returns. Imports no torch and no zmq, so that
tests drive it directly.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trio_llm.config import EngineConfig
from trio_llm.engine.clients import OWNER, Addressed, Clients
from trio_llm.engine.control_calls import BETWEEN_STEPS, REPLACE_WEIGHTS, ControlCalls
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.request_checks import find_input_problem, find_request_problem
from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.results import unknown_row
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step_budget import StepBudget
from trio_llm.engine.step_pipeline import StepPipeline
from trio_llm.wire.messages import (
    Abort,
    Ack,
    AttachClient,
    Continue,
    DetachClient,
    EngineCoreOutput,
    EngineCoreRequest,
    ModelConfig,
    Ready,
    SchedulerStats,
    ToEngine,
    UtilityCall,
)

__all__ = ["EngineCore"]


class EngineCore:
    """Scheduler and executor behind the wire's messages.

    One turn of the loop is: `handle` what has arrived, open and close sockets as `take_link_changes()` says, send
    `take_answers()`, `step()` and `take_heartbeats()`.

    A *client* is a front end. Each has an index, an outbox and credit of its own. A message that is to be sent comes
    with the index of the client that it is for.

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
        self._epoch, self._engine_index = epoch, engine_index
        self._scheduler = Scheduler(SchedulerLimits.of(executor.info, config))
        self._kv_log = self._scheduler.kv_event_log
        self._pipeline = StepPipeline(
            executor,
            self._scheduler,
            run_ahead=_default_run_ahead(executor.info) if config.run_ahead is None else config.run_ahead,
            budget=_make_step_budget(executor.info, config),
            clock=clock,
        )
        self._clients = Clients(
            self._scheduler,
            epoch=epoch,
            engine_index=engine_index,
            credit_steps=config.credit_steps,
            num_blocks=executor.info.num_blocks,
            now_s=clock(),
        )
        self._sealed: list[Addressed] = []
        """Messages that are complete and not taken yet."""
        self._link_changes: list[AttachClient | DetachClient] = []
        self._control_calls = ControlCalls(
            executor,
            self._scheduler,
            num_sent=lambda client_index: self._clients[client_index].num_sent,
            profile_dir=config.profile_dir,
        )

    def ready(self) -> Ready:
        """The message that opens this engine for requests."""
        return Ready(self._epoch, self._executor.info, self._engine_index)

    @property
    def has_credit(self) -> bool:
        """At least one client is close enough behind for another step."""
        return self._clients.has_credit

    @property
    def is_busy(self) -> bool:
        """There is something to compute or to send now. False also when only an `Ack` can help."""
        may_plan = self._control_calls.state.may_step and self._scheduler.has_unfinished
        can_step = (may_plan or not self._pipeline.is_empty or bool(self._kv_log)) and self.has_credit
        return can_step or self._clients.is_due or bool(self._sealed)

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self._scheduler.stats()

    @property
    def heartbeat_due_s(self) -> float:
        """Time of the clock from which `take_heartbeats` has something."""
        return self._clients.heartbeat_due_s

    def handle(self, message: ToEngine, client_index: int = OWNER) -> str | None:
        """Take one message of a client. A bad message fails only its own request or call.

        Returns:
            Why the message was dropped, or None if it was not.

        Raises:
            Exception: the executor failed as a whole, in a step that a utility call had to wait for, or in the call.
        """
        if client_index not in self._clients:
            return f"client {client_index} is not attached"
        match message:
            case EngineCoreRequest():
                self._add(message, client_index)
            case Continue():
                self._continue(message, client_index)
            case Abort():
                self._abort(message.request_ids, client_index)
            case Ack():
                self._clients.acknowledge(client_index, message.step)
            case UtilityCall():
                self._call(message, client_index)
            case AttachClient() | DetachClient():
                if client_index != OWNER:
                    return f"client {client_index} may neither attach nor detach clients; client {OWNER} does"
                return self._attach(message) if isinstance(message, AttachClient) else self._detach(message)
        return None

    def take_link_changes(self) -> list[AttachClient | DetachClient]:
        """Which clients have come and gone, in order. An attached client that was there has other addresses now."""
        changes, self._link_changes = self._link_changes, []
        return changes

    def take_answers(self) -> list[Addressed]:
        """All that can be sent before the next step: answers to calls, confirmations of aborts, and the last rows of
        requests that were refused or have expired.

        To be sent before `step` is called, so that none of them waits for tokens. Answers need no credit.
        """
        self._clients.add_rows(self._scheduler.take_expired(self._clock()))
        self._collect()
        if self._clients.is_due:
            self._sealed += self._seal(self._stats_between_steps())
        answers, self._sealed = self._sealed, []
        return answers

    def step(self) -> list[Addressed]:
        """Retire one step and return its messages, one per client that it has something for.

        If we run ahead, the step after it is launched before. For clients without credit no tokens are computed.

        Raises:
            Exception: the executor failed as a whole; the engine cannot go on.
        """
        assert not self._sealed, "take_answers() comes first"
        had_steps = not self._pipeline.is_empty
        if self.has_credit:
            self._clients.add_rows(self._pipeline.advance(may_plan=self._control_calls.state.may_step))
        self._collect()
        if had_steps and self._pipeline.is_empty and not self._scheduler.has_unfinished:
            # A step that was in flight when the last sequence ended has given its blocks back only now.
            self._clients.tell_all()
        return self._seal(self._stats()) if self._clients.is_due else []

    def take_heartbeats(self) -> list[Addressed]:
        """The messages that show that the loop turns, to the clients that were sent nothing for a second; statistics go
        along where they have changed."""
        now_s = self._clock()
        if now_s < self._clients.heartbeat_due_s:
            return []
        return self._clients.make_heartbeats(
            now_s,
            self._stats_between_steps(),
            weight_version=self._control_calls.state.weight_version,
            num_executed=self._pipeline.num_retired,
        )

    def _collect(self) -> None:
        """Let the clients have what has come of control calls and of the prefix cache."""
        for client_index, result in self._control_calls.settle():
            self._clients[client_index].answer(result)
        if self._kv_log:
            self._clients.add_kv_events(self._kv_log.take())

    def _stats_between_steps(self) -> SchedulerStats:
        """The counts of the last step were in the messages of that step."""
        return msgspec.structs.replace(self._stats(), num_prompt_tokens=0, num_cached_tokens=0)

    def _stats(self) -> SchedulerStats:
        """What the scheduler says, and what control calls keep from going on."""
        stats, control = self._scheduler.stats(), self._control_calls.state
        if control.may_step:
            return stats
        level = control.sleep_state.level
        return msgspec.structs.replace(stats, num_deferred=stats.num_waiting, sleep_level=level)

    def _seal(self, stats: SchedulerStats, *, without_credit: bool = False) -> list[Addressed]:
        version = self._control_calls.state.weight_version
        return self._clients.seal(self._clock(), stats, weight_version=version, without_credit=without_credit)

    # --------------------------------------------------------------------------------------- clients

    def _attach(self, message: AttachClient) -> str | None:
        if problem := self._clients.refuse_attach(message):
            return problem
        self._forget_client(message.client_index)
        self._clients.attach(message, self._clock())
        self._sealed.append((message.client_index, self.ready()))
        self._link_changes.append(message)
        return None

    def _detach(self, message: DetachClient) -> str | None:
        if message.client_index == OWNER:
            return f"client {OWNER} cannot be detached"
        self._forget_client(message.client_index)
        self._link_changes.append(message)
        return None

    def _forget_client(self, client_index: int) -> None:
        self._clients.detach(client_index)
        self._control_calls.forget_client(client_index)
        self._sealed = [sealed for sealed in self._sealed if sealed[0] != client_index]

    # ------------------------------------------------------------------------------------- messages

    def _add(self, request: EngineCoreRequest, client_index: int) -> None:
        problem = find_request_problem(request, self._executor.info)
        if request.request_id in self._scheduler:
            problem = f"the engine already runs a request {request.request_id!r}"
        if problem:
            self._clients[client_index].answer(
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
        self._clients.own(client_index, request.request_id)
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
                client_index=client_index,
            )
        )

    def _continue(self, message: Continue, client_index: int) -> None:
        if not self._clients.owns(client_index, message.request_id):
            return  # as for any unknown id: an abort and an input may cross
        problem = find_input_problem(message, self._executor.info)
        if row := self._scheduler.continue_session(message, problem):
            self._answer_last(row, client_index)

    def _abort(self, request_ids: list[str], client_index: int) -> None:
        for request_id in request_ids:
            if self._clients.owns(client_index, request_id):
                self._answer_last(self._scheduler.abort(request_id), client_index)
            else:
                self._clients[client_index].answer(unknown_row(request_id))

    def _answer_last(self, row: EngineCoreOutput, client_index: int) -> None:
        """Send the last row of a request to its client."""
        self._clients.disown(row.request_id)
        self._clients[client_index].answer(row)

    def _call(self, call: UtilityCall, client_index: int) -> None:
        if call.method in BETWEEN_STEPS:
            self._clients.add_rows(self._pipeline.drain())
        if call.method in REPLACE_WEIGHTS:
            # Tokens that wait were computed by the old weights, and their messages must say so.
            self._sealed += self._seal(self._stats(), without_credit=True)
        for caller, result in self._control_calls.call(call, client_index):
            self._clients[caller].answer(result)
        self._clients.add_rows(self._control_calls.take_rows())


def _default_run_ahead(model: ModelConfig) -> int:
    """A GPU computes while the host plans the next step; a CPU has no time to gain."""
    return 1 if model.device.startswith("cuda") else 0


def _make_step_budget(model: ModelConfig, config: EngineConfig) -> StepBudget | None:
    if config.step_time_target_s == 0:
        return None
    return StepBudget(config.step_time_target_s, block_size=model.block_size, max_tokens=config.max_num_batched_tokens)
