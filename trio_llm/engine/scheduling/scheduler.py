"""Scheduler: which tokens of which sequences the next step computes, and what its result means for them.

Pure: the engine loop calls it, runs the plan, and hands the result back.

    add ──> WAITING ── _admit ──> RUNNING ── commit: a stop rule, a failed row ──> FINISHED
              ^ │                   │ │
              │ └ abort, deadline   │ └ abort ──> FINISHED
              ├──── _preempt ───────┤
              └ resume ── IDLE ─────┘ commit: the end of an answer of a session
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trio_llm.engine.scheduling.invariants import check_scheduler
from trio_llm.engine.scheduling.kv_event_log import KVEventLog
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.pooling import pooled_row
from trio_llm.engine.scheduling.rows import final_row, find_fault, take_scores
from trio_llm.engine.scheduling.sequence import Sequence, SequenceQueue, SequenceState
from trio_llm.engine.scheduling.sequence_blocks import SequenceBlocks
from trio_llm.engine.scheduling.sessions import extend
from trio_llm.engine.scheduling.step import PooledVector, SampledToken, StepBuilder, StepInFlight, StepPlan, StepResult
from trio_llm.engine.scheduling.stopping import ends_with_pending, find_end
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import Continue, EngineCoreOutput, SchedulerStats

__all__ = ["Scheduler"]


class Scheduler:
    """Call `schedule`, run the plan, `commit`; `add`, `abort` and `take_expired` at any moment between.

    More than one plan may be in flight: a plan then counts on a token for each row that the plans before it sample, and
    what it computes behind the end of a sequence is dropped. Plans are committed in their order.

    Everything follows one order: priority, then arrival. Whoever is first gets tokens and blocks first and is
    preempted last; nobody is admitted past the head of the waiting line. So the first running sequence
    advances in every step, and every sequence ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._blocks = SequenceBlocks(limits)
        self._sequences: dict[str, Sequence] = {}
        """All unfinished ones, by request id; each is in one of the two queues, unless it is idle."""
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._in_flight: deque[StepInFlight] = deque()
        """Scheduled and not committed, the oldest first."""
        self.admits_new = True
        """False: only sequences that are under way get their turn, to their end; new ones wait."""
        self._num_arrivals = 0
        self._num_preempted = 0
        self._num_prompt_tokens = 0
        """In the last committed step."""
        self._num_cached_tokens = 0
        """Found in the cache for sequences that were admitted since the last committed step."""
        self._num_cached_tokens_told = 0
        """In the last committed step, and since the one before."""

    # ------------------------------------------------------------------------------------ sequences

    @property
    def has_unfinished(self) -> bool:
        """There is something to compute. Idle sessions have nothing, nor have those that must wait."""
        return bool(self._running) or self._next_waiting() is not None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting line. Tokens beyond its prompt count as generated before."""
        assert sequence.request_id not in self._sequences, f"{sequence.request_id} is here already"
        assert 0 < sequence.num_prompt_tokens <= len(sequence.token_ids) < self._limits.longest(sequence.pooling)
        assert sequence.params.max_tokens is not None, f"{sequence.request_id}: max_tokens is not filled in"
        assert sequence.num_output_tokens < sequence.params.max_tokens
        assert sequence.state is SequenceState.WAITING
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        sequence.is_under_way = sequence.num_output_tokens > 0
        self._sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def resume(self, message: Continue, problem: str | None = None) -> EngineCoreOutput | None:
        """Take the next input of a session: behind all that waits already, as a new request would be.

        Args:
            problem: why it cannot be, if that is known already.

        Returns:
            The last row of a session that cannot go on with it. Nothing, too, for ids that are not known: an abort and
            an input may cross.
        """
        sequence = self._sequences.get(message.request_id)
        if sequence is None:
            return None
        if problem := problem or extend(sequence, message, self._limits.max_model_len):
            self._finish(sequence, "error")
            return final_row(sequence, error=problem)
        self._blocks.kept.remove(sequence)
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        sequence.move_to(SequenceState.WAITING)
        self._blocks.kept.add(sequence)
        self._waiting.add(sequence)
        return None

    def abort(self, request_id: str) -> EngineCoreOutput:
        """Forget a request, at any moment; what a step in flight samples for it is dropped.

        Returns:
            The confirming row. Ids that are unknown, or known no more, get one too: whoever sent the abort
            waits for it.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return EngineCoreOutput(request_id=request_id, start=0, new_token_ids=[], finish_reason="abort")
        self._finish(sequence, "abort")
        return final_row(sequence)

    def abort_all(self) -> list[EngineCoreOutput]:
        """`abort` every request, sessions between inputs included."""
        return [self.abort(request_id) for request_id in list(self._sequences)]

    def take_expired(self, now_s: float) -> list[EngineCoreOutput]:
        """Drop the sequences whose deadline passed before anything was computed for them.

        Those that have begun go on, also if they were preempted or recovered: the work is paid for.

        Args:
            now_s: the clock of `Sequence.expires_at`, seconds.

        Returns:
            The last row of each, an error that says so.
        """
        expired = [
            sequence
            for sequence in self._waiting
            if sequence.expires_at is not None
            and sequence.expires_at <= now_s
            and sequence.num_preemptions == 0
            and sequence.num_output_tokens == 0
        ]
        for sequence in expired:
            self._finish(sequence, "error")
        error = "the deadline of this request passed while it waited for its turn; nothing was computed"
        return [final_row(sequence, error=error, is_expired=True) for sequence in expired]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._blocks.kept.remove(sequence)
            if sequence.state is SequenceState.WAITING:
                self._waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason = reason
        del self._sequences[sequence.request_id]

    def _release_blocks(self, sequence: Sequence) -> None:
        block_ids = self._blocks.take_all(sequence)
        if sequence.num_in_flight:
            self._in_flight[-1].left_behind.append(block_ids)
        else:
            self._blocks.release(block_ids)

    # ------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is none: nothing to compute, or a plan in flight must be committed first."""
        # Whoever gives way is not in flight then: what a step samples for it would have to be waited for all the same.
        if self._in_flight and self._must_preempt():
            return None
        draft = StepBuilder(self._limits.max_num_batched_tokens)
        self._plan_last_tokens(draft)
        self._plan_prefills(draft)
        self._admit(draft)
        if not draft.chunks:
            assert self._in_flight or not self.has_unfinished, "sequences are left and none can go on"
            return None
        plan = StepPlan(tuple(draft.chunks))
        self._in_flight.append(StepInFlight(plan))
        return plan

    def _add(self, sequence: Sequence, draft: StepBuilder) -> None:
        draft.add(sequence)
        # At once: whoever is added next may share what this chunk computes.
        self._blocks.publish(sequence)

    def _next_rows(self) -> Iterator[Sequence]:
        """Running sequences with one token to go, which is every one that decodes: they make the tokens that readers
        wait for. In order, so that `_preempt`, which takes the last, never hits one that was given already."""
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING or sequence.num_uncomputed_tokens != 1:
                continue
            # A session goes on behind its answer, so nothing may be computed there that is dropped.
            if sequence.num_pending_tokens and (sequence.is_resumable or ends_with_pending(sequence, self._limits)):
                continue
            yield sequence

    def _must_preempt(self) -> bool:
        missing = sum(self._blocks.num_missing(sequence) for sequence in self._next_rows())
        return missing > self._blocks.num_free

    def _plan_last_tokens(self, draft: StepBuilder) -> None:
        for sequence in self._next_rows():
            if self._make_room(sequence):
                self._add(sequence, draft)

    def _plan_prefills(self, draft: StepBuilder) -> None:
        """Chunks of prompts, and of preempted sequences, that are under way; they got all their blocks on admission."""
        for sequence in self._running:
            if draft.budget_left == 0:
                return
            if sequence.num_uncomputed_tokens > 1:
                self._add(sequence, draft)

    def _admit(self, draft: StepBuilder) -> None:
        """Let waiting sequences in, while budget, places and blocks last.

        A sequence gets blocks for all its known tokens at once: a prefill never stops half-way for want of
        blocks, and one that was preempted does not come back just to be preempted again. As a prefill that is under way
        takes the budget first, nobody is admitted before the prompt that it shares with another is planned whole.
        """
        while draft.budget_left > 0 and len(self._running) < self._limits.max_num_seqs:
            if (sequence := self._next_waiting()) is None:
                return
            was_computed = sequence.num_computed_tokens
            # One that is alone needs no spare blocks: all are its own.
            num_spare = self._limits.num_spare_blocks if self._running else 0
            num_evicted = self._blocks.admit(sequence, num_spare=num_spare)
            if num_evicted is None:
                return
            self._num_preempted += num_evicted
            self._num_cached_tokens += sequence.num_computed_tokens - was_computed
            self._waiting.remove(sequence)
            sequence.move_to(SequenceState.RUNNING)
            sequence.is_under_way = True
            self._running.add(sequence)
            self._add(sequence, draft)

    def _next_waiting(self) -> Sequence | None:
        """Whom to admit next."""
        return next((one for one in self._waiting if self.admits_new or one.is_under_way), None)

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a running sequence, at the cost of later ones.

        Returns:
            False if the sequence is itself the last of those that could give way, and did.
        """
        while (missing := self._blocks.num_missing(sequence)) > self._blocks.num_free:
            if self._blocks.kept:
                self._num_preempted += self._blocks.kept.take(missing, but=sequence)
                continue
            victim = self._running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.extend(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting line, to its place by priority and arrival; its tokens will be computed again."""
        self._running.remove(sequence)
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.move_to(SequenceState.WAITING)
        self._waiting.add(sequence)
        self._num_preempted += 1

    def preempt_all(self) -> None:
        """Take all blocks from all and forget what they hold: everything will be computed again. Nothing may be in
        flight."""
        assert not self._in_flight, "a step in flight still writes into blocks"
        while self._running:
            self._preempt(self._running.last)
        self._num_preempted += self._blocks.kept.take_all()
        self._blocks.forget_all()

    # --------------------------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
        """Take in what the plan in flight gave: new tokens, ended sequences.

        Returns:
            A row for each sequence that got a token, a vector or an error, and before those, rows with what is new of
            prompts' log-probabilities; none for sequences aborted meanwhile.
        """
        assert self._in_flight, "no plan is in flight"
        step = self._in_flight[0]
        assert plan is step.plan, "this plan is not the oldest in flight"
        assert len(result.sampled) == sum(chunk.samples for chunk in plan.chunks), "not one result a row that samples"
        self._in_flight.popleft()
        self._num_prompt_tokens = 0
        self._num_cached_tokens_told, self._num_cached_tokens = self._num_cached_tokens, 0
        rows = take_scores(plan, result) if result.scored else []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            sequence, outcome = chunk.sequence, next(sampled) if chunk.samples else None
            self._num_prompt_tokens += max(0, min(chunk.count, sequence.num_prompt_tokens - chunk.start))
            sequence.num_in_flight -= 1
            sequence.num_pending_tokens -= chunk.samples
            if sequence.state is SequenceState.FINISHED or outcome is None:
                continue
            if problem := find_fault(outcome, self._limits):
                self._blocks.forget(sequence)
                self._finish(sequence, "error")
                rows.append(final_row(sequence, error=problem))
            elif isinstance(outcome, PooledVector):
                self._finish(sequence, "stop")
                rows.append(pooled_row(sequence, outcome))
            else:
                assert isinstance(outcome, SampledToken)
                rows.append(self._append(sequence, outcome))
        for block_ids in step.left_behind:
            self._blocks.release(block_ids)
        return rows

    def _append(self, sequence: Sequence, sampled: SampledToken) -> EngineCoreOutput:
        start = sequence.next_start
        sequence.token_ids.append(sampled.token_id)
        finish_reason, stop_reason = find_end(sequence, self._limits)
        if finish_reason is not None:
            if sequence.is_resumable:
                self._rest(sequence)
            else:
                self._finish(sequence, finish_reason)
        return EngineCoreOutput(
            request_id=sequence.request_id,
            start=start,
            new_token_ids=[sampled.token_id],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=(sequence.num_cached_tokens or 0) if start == 0 else 0,
            goes_on=sequence.is_resumable and finish_reason is not None,
        )

    def _rest(self, sequence: Sequence) -> None:
        """An answer of a session is over: it keeps its blocks until the next input comes or others need them."""
        self._running.remove(sequence)
        sequence.move_to(SequenceState.IDLE)
        sequence.is_under_way = False
        self._blocks.kept.add(sequence)

    # ---------------------------------------------------------------------------------- observation

    @property
    def kv_event_log(self) -> KVEventLog | None:
        """What entered and left the prefix cache and was not taken yet. None: nobody wants to know."""
        return self._blocks.log

    def reset_prefix_cache(self) -> None:
        """Let no request find what was computed before now. What runs keeps what it has."""
        self._blocks.forget_all()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._limits.num_blocks,
            num_preempted=self._num_preempted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens_told,
            num_cached_blocks=self._blocks.num_cached,
        )

    def check(self) -> None:
        """Assert all invariants. Costs a walk over everything: for tests."""
        check_scheduler(
            self._limits,
            self._sequences,
            waiting=self._waiting,
            running=self._running,
            blocks=self._blocks,
            in_flight=self._in_flight,
        )
