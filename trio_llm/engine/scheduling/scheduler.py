"""Scheduler: which tokens of which sequences the next step computes, and what its result means for them.

Pure: the engine core calls it, runs the plan, and hands the result back.

    add ──> WAITING ── _admit ──> RUNNING ── commit: a stop rule, a failed row ──> FINISHED
              ^ │                   │ │
              │ └ abort, deadline   │ └ abort ──> FINISHED
              ├──── _preempt ───────┤
              ├ continue_session ── IDLE ── commit: the end of an answer of a session
              └ resume ────────── SUSPENDED ── suspend, from WAITING or RUNNING: its client has no credit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from trio_llm.engine.scheduling import results
from trio_llm.engine.scheduling.invariants import check_scheduler
from trio_llm.engine.scheduling.kv_event_log import KVEventLog
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.sequence_table import SequenceTable
from trio_llm.engine.scheduling.sessions import extend
from trio_llm.engine.scheduling.step import PooledVector, SampledToken, StepBuilder, StepInFlight, StepPlan, StepResult
from trio_llm.engine.scheduling.stopping import find_end, must_await_pending
from trio_llm.engine.scheduling.suspension import Suspension
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import Continue, EngineCoreOutput, SchedulerStats

__all__ = ["Scheduler"]


class Scheduler:
    """Call `schedule`, run the plan, `commit`; `add`, `abort` and `take_expired` at any moment between.

    More than one plan may be in flight: a plan then counts on a token for each row that the plans before it sample, and
    what it computes behind the end of a sequence is dropped. Plans are committed in their order.

    Everything follows one order: priority, then arrival. The first sequence gets tokens and blocks first and is
    preempted last, and no sequence is admitted before the head of the waiting line. So the first running sequence
    advances in every step, and every sequence ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._blocks = SequenceBlocks(limits)
        self._sequences = SequenceTable()
        self._in_flight: deque[StepInFlight] = deque()
        """Scheduled and not committed, the oldest first."""
        self.admits_new = True
        """False: only sequences whose answer has begun are scheduled, to their end; new ones wait."""
        self.suspension = Suspension(self._sequences, self._blocks)
        self._counts = results.StepCounts()

    # ------------------------------------------------------------------------------------ sequences

    @property
    def has_unfinished(self) -> bool:
        """There is something to compute now. False if only idle sessions are left, and sequences that have to wait."""
        return bool(self._sequences.running) or self._next_waiting() is not None

    @property
    def has_begun(self) -> bool:
        """A sequence is unfinished whose answer has begun, suspended ones included. Costs a walk."""
        return any(sequence.has_begun for sequence in self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line. Tokens beyond its prompt count as generated before."""
        assert 0 < sequence.num_prompt_tokens <= len(sequence.token_ids) < self._limits.longest(sequence.pooling)
        assert sequence.params.max_tokens is not None, f"{sequence.request_id}: max_tokens is not filled in"
        assert sequence.num_output_tokens < sequence.params.max_tokens
        sequence.has_begun = sequence.num_output_tokens > 0
        self._sequences.add(sequence)
        self.suspension.place(sequence)

    def continue_session(self, message: Continue, problem: str | None = None) -> EngineCoreOutput | None:
        """Take the next input of a session and put it at the end of the waiting line, as a new request would be.

        Args:
            problem: why the session cannot take the input, if the caller knows already.

        Returns:
            The last row of a session that cannot take it, else None. None, too, for an unknown id: an abort and an
            input may cross.
        """
        sequence = self._sequences.get(message.request_id)
        if sequence is None:
            return None
        if problem := problem or extend(sequence, message, self._limits.max_model_len):
            self._finish(sequence, "error")
            return results.final_row(sequence, error=problem)
        # The idle blocks are in the order of sequences, which `requeue` changes.
        self._blocks.idle.remove(sequence)
        self._sequences.requeue(sequence)
        self._blocks.idle.add(sequence)
        self.suspension.place(sequence)
        return None

    def abort(self, request_id: str) -> EngineCoreOutput:
        """Forget a request, at any moment; what a step in flight samples for it is dropped.

        Returns:
            The confirming row. An unknown id gets one too, since the front end waits for it.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return results.unknown_row(request_id)
        self._finish(sequence, "abort")
        return results.final_row(sequence)

    def abort_all(self, client_index: int | None = None) -> list[EngineCoreOutput]:
        """`abort` every request, idle sessions included, or every request of one client."""
        aborted = [one for one in self._sequences if client_index is None or one.client_index == client_index]
        return [self.abort(sequence.request_id) for sequence in aborted]

    def take_expired(self, now_s: float) -> list[EngineCoreOutput]:
        """Drop the sequences whose deadline passed before anything was computed for them.

        Sequences that have begun go on, also if they were preempted or recovered.

        Args:
            now_s: the clock of `Sequence.expires_at`, seconds.

        Returns:
            The last row of each, an error that says so.
        """
        expired = self._sequences.find_expired(now_s)
        for sequence in expired:
            self._finish(sequence, "error")
        return list(map(results.expired_row, expired))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is not SequenceState.RUNNING:
            self._blocks.idle.remove(sequence)
        self._release_blocks(sequence)
        self._sequences.move(sequence, SequenceState.FINISHED)
        sequence.finish_reason = reason

    def _release_blocks(self, sequence: Sequence) -> None:
        block_ids = self._blocks.take_all(sequence)
        if sequence.num_in_flight:
            self._in_flight[-1].left_behind.append(block_ids)
        else:
            self._blocks.release(block_ids)

    # ------------------------------------------------------------------------------------- schedule

    def schedule(self, *, now_s: float = 0.0, max_prefill_tokens: int | None = None) -> StepPlan | None:
        """The next step, or None if there is none: nothing to compute, or a plan in flight must be committed first.

        Args:
            now_s: the clock of `Sequence.arrived_s`, seconds.
            max_prefill_tokens: tokens beside those of answers, if the step has any of those; None: the whole budget.
        """
        # No sequence of a step in flight is preempted or suspended: its token is sampled all the same.
        if self._in_flight and (self.suspension.is_due or self._must_preempt()):
            return None
        self.suspension.apply()
        limits = self._limits
        builder = StepBuilder(limits.max_num_batched_tokens, limits.max_prompt_logprob_cost, max_prefill_tokens)
        self._plan_last_tokens(builder)
        builder.limit_prefills()
        self._plan_prefills(builder)
        self._admit(builder, now_s)
        if not builder.chunks:
            assert self._in_flight or not self.has_unfinished, "sequences are left and none can go on"
            return None
        plan = StepPlan(tuple(builder.chunks))
        self._in_flight.append(StepInFlight(plan))
        return plan

    def _plan(self, sequence: Sequence, builder: StepBuilder) -> None:
        if builder.add(sequence):
            # At once: a sequence that is planned next may share what this chunk computes.
            self._blocks.publish(sequence)

    def _next_rows(self) -> Iterator[Sequence]:
        """Running sequences with one token to go, which is every one that decodes.

        In order, so that `_preempt`, which takes the last, never takes one that was yielded already.
        """
        for sequence in list(self._sequences.running):
            if sequence.state is not SequenceState.RUNNING or sequence.num_uncomputed_tokens != 1:
                continue
            if sequence.num_pending_tokens and must_await_pending(sequence, self._limits):
                continue
            yield sequence

    def _must_preempt(self) -> bool:
        missing = sum(self._blocks.num_missing(sequence) for sequence in self._next_rows())
        return missing > self._blocks.num_free

    def _plan_last_tokens(self, builder: StepBuilder) -> None:
        for sequence in self._next_rows():
            if self._make_room(sequence):
                self._plan(sequence, builder)

    def _plan_prefills(self, builder: StepBuilder) -> None:
        """Go on with prompts, and with preempted sequences; they got all their blocks on admission."""
        for sequence in self._sequences.running:
            if builder.tokens_left == 0:
                return
            if sequence.num_uncomputed_tokens > 1:
                self._plan(sequence, builder)

    def _admit(self, builder: StepBuilder, now_s: float) -> None:
        """Admit waiting sequences while budget, places and blocks last.

        A sequence gets blocks for all its known tokens at once: a prefill never stops half-way for lack of blocks, and
        a sequence that was preempted does not come back just to be preempted again. A prefill that has begun takes
        the budget first, so no sequence is admitted before the prompt that it shares with another is planned whole. The
        exception are prompts whose log-probabilities are asked for: a step that cannot afford more of those goes on
        with the sequences behind them.
        """
        while builder.tokens_left > 0 and len(self._sequences.running) < self._limits.max_num_seqs:
            if (sequence := self._next_waiting()) is None:
                return
            was_computed = sequence.num_computed_tokens
            # A sequence that is alone needs no spare blocks: all are its own.
            num_spare = self._limits.num_spare_blocks if self._sequences.running else 0
            num_evicted = self._blocks.admit(sequence, num_spare=num_spare)
            if num_evicted is None:
                return
            self._counts.num_preempted += num_evicted
            self._counts.num_cached_now += sequence.num_computed_tokens - was_computed
            self._sequences.move(sequence, SequenceState.RUNNING)
            sequence.begin(now_s)
            self._plan(sequence, builder)
            if was_computed:  # it was suspended, and its answer may go on
                builder.limit_prefills()

    def _next_waiting(self) -> Sequence | None:
        return self._sequences.next_waiting(only_begun=not self.admits_new)

    def _make_room(self, sequence: Sequence) -> bool:
        """Give a running sequence blocks for all its tokens, at the cost of later sequences.

        Returns:
            False if the sequence is itself the last one that could give up its blocks, and did.
        """
        while (missing := self._blocks.num_missing(sequence)) > self._blocks.num_free:
            if self._blocks.idle:
                self._counts.num_preempted += self._blocks.idle.take(missing, but=sequence)
                continue
            victim = self._sequences.running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.extend(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back to its place in the waiting line; its tokens will be computed again."""
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._sequences.move(sequence, SequenceState.WAITING)
        self._counts.num_preempted += 1

    def preempt_all(self) -> None:
        """Take all blocks from all sequences and forget what they hold: everything will be computed again.

        No step may be in flight.
        """
        assert not self._in_flight, "a step in flight still writes into blocks"
        while self._sequences.running:
            self._preempt(self._sequences.running.last)
        self._counts.num_preempted += self._blocks.idle.take_all()
        self._blocks.forget_all()

    # --------------------------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
        """Take the result of the oldest plan in flight: add new tokens, end sequences.

        Returns:
            A row for each sequence that got a token, a vector or an error, and before those, rows with new prompt
            log-probabilities; none for sequences aborted meanwhile.
        """
        assert self._in_flight, "no plan is in flight"
        step = self._in_flight[0]
        assert plan is step.plan, "this plan is not the oldest in flight"
        assert len(result.sampled) == sum(chunk.samples for chunk in plan.chunks), "not one result per row that samples"
        self._in_flight.popleft()
        self._counts.count_step(plan)
        rows = results.prompt_logprob_rows(plan, result) if result.prompt_logprobs else []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            sequence, outcome = chunk.sequence, next(sampled) if chunk.samples else None
            sequence.num_in_flight -= 1
            sequence.num_pending_tokens -= chunk.samples
            if sequence.state is SequenceState.FINISHED or outcome is None:
                continue
            if problem := results.find_fault(outcome, self._limits):
                self._blocks.forget(sequence)
                self._finish(sequence, "error")
                rows.append(results.final_row(sequence, error=problem))
            elif isinstance(outcome, PooledVector):
                self._finish(sequence, "stop")
                rows.append(results.pooled_row(sequence, outcome))
            else:
                assert isinstance(outcome, SampledToken)
                rows.append(self._append(sequence, outcome))
        for block_ids in step.left_behind:
            self._blocks.release(block_ids)
        return rows

    def _append(self, sequence: Sequence, sampled: SampledToken) -> EngineCoreOutput:
        sequence.token_ids.append(sampled.token_id)
        finish_reason, stop_reason = find_end(sequence, self._limits)
        if finish_reason is not None:
            if sequence.is_resumable:
                self._make_idle(sequence)
            else:
                self._finish(sequence, finish_reason)
        return results.token_row(sequence, sampled, finish_reason=finish_reason, stop_reason=stop_reason)

    def _make_idle(self, sequence: Sequence) -> None:
        """End an answer of a session, which keeps its blocks until its next input comes or others need them."""
        self._sequences.move(sequence, SequenceState.IDLE)
        sequence.has_begun = False
        self._blocks.idle.add(sequence)

    # ---------------------------------------------------------------------------------- observation

    @property
    def kv_event_log(self) -> KVEventLog | None:
        """What entered and left the prefix cache and was not taken yet. None: the configuration does not ask for it."""
        return self._blocks.log

    def reset_prefix_cache(self) -> None:
        """Let no request find what was computed before now. Running sequences keep their blocks."""
        self._blocks.forget_all()

    def stats(self) -> SchedulerStats:
        return self._counts.make_stats(self._sequences, self._blocks, self._limits, admits_new=self.admits_new)

    def count_owed_tokens(self) -> Mapping[int, int]:
        """By client: tokens that are still to be computed. Costs a walk over all sequences."""
        return self._sequences.count_owed_tokens()

    def check(self) -> None:
        """Assert all invariants. Costs a walk over everything: for tests."""
        check_scheduler(self._limits, self._sequences, self._blocks, self._in_flight)
        self.suspension.check()
