"""Scheduler: which tokens of which sequences the next step computes, and what its result means for them.

Pure: the engine loop calls it, runs the plan, and hands the result back.

    add ──> WAITING ── _admit ──> RUNNING ── commit: a stop rule, a failed row ──> FINISHED
              ^ │                   │ │
              │ └ abort, deadline   │ └ abort ──> FINISHED
              ├──── _preempt ───────┤
              └ resume ── IDLE ─────┘ commit: the end of an answer of a session
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trio_llm.engine.executor.base import PooledVector, RowError, SampledToken, ScheduledChunk, StepPlan, StepResult
from trio_llm.engine.scheduling.blocks import BlockPool
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.pooling import pooled_row
from trio_llm.engine.scheduling.rows import final_row, take_scores
from trio_llm.engine.scheduling.sequence import Sequence, SequenceQueue, SequenceState
from trio_llm.engine.scheduling.sessions import KeptBlocks, extend
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import Continue, EngineCoreOutput, SchedulerStats

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget_left: int
    """Tokens."""
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Compute as much of the sequence as the budget allows."""
        uncomputed = sequence.num_uncomputed_tokens
        count = min(uncomputed, self.budget_left)
        self.chunks.append(
            ScheduledChunk(
                sequence=sequence, start=sequence.num_computed_tokens, count=count, samples=count == uncomputed
            )
        )
        self.budget_left -= count


class Scheduler:
    """Call `schedule`, run the plan, `commit`; `add`, `abort` and `take_expired` at any moment between.

    Everything follows one order: priority, then arrival. Whoever is first gets tokens and blocks first and is
    preempted last; nobody is admitted past the head of the waiting line. So the first running sequence
    advances in every step, and every sequence ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._sequences: dict[str, Sequence] = {}
        """All unfinished ones, by request id; each is in one of the two queues, unless it is idle."""
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._kept = KeptBlocks(self._pool)
        self._in_flight: StepPlan | None = None
        """The plan that is scheduled and not committed. There is at most one, hence blocks that an abort frees
        meanwhile cannot be given to anybody before the step that writes to them is over."""
        self._num_arrivals = 0
        self._num_preempted = 0
        self._num_prompt_tokens = 0
        """In the last committed step."""

    # ------------------------------------------------------------------------------------ sequences

    @property
    def has_unfinished(self) -> bool:
        """There is something to compute. Idle sessions have nothing."""
        return bool(self._running or self._waiting)

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
        self._kept.remove(sequence)
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        sequence.move_to(SequenceState.WAITING)
        self._kept.add(sequence)
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
            self._kept.remove(sequence)
            if sequence.state is SequenceState.WAITING:
                self._waiting.remove(sequence)
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason = reason
        del self._sequences[sequence.request_id]

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []

    # ------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no sequence is left that could go on. The plan before must be committed."""
        assert self._in_flight is None, "the plan before is not committed"
        draft = _Draft(self._limits.max_num_batched_tokens)
        self._plan_last_tokens(draft)
        self._plan_prefills(draft)
        self._admit(draft)
        if not draft.chunks:
            assert not self.has_unfinished, "sequences are left and none can go on"
            return None
        self._in_flight = StepPlan(tuple(draft.chunks))
        return self._in_flight

    def _plan_last_tokens(self, draft: _Draft) -> None:
        """Rows with one token to go, which is every one that decodes: they make the tokens that readers wait for."""
        # In order, so that `_preempt`, which takes the last, never hits one that is in the draft already.
        for sequence in list(self._running):
            is_running = sequence.state is SequenceState.RUNNING
            if is_running and sequence.num_uncomputed_tokens == 1 and self._make_room(sequence):
                draft.add(sequence)

    def _plan_prefills(self, draft: _Draft) -> None:
        """Chunks of prompts, and of preempted sequences, that are under way; they got all their blocks on admission."""
        for sequence in self._running:
            if draft.budget_left == 0:
                return
            if sequence.num_uncomputed_tokens > 1:
                draft.add(sequence)

    def _admit(self, draft: _Draft) -> None:
        """Let waiting sequences in, while budget, places and blocks last.

        A sequence gets blocks for all its known tokens at once: a prefill never stops half-way for want of
        blocks, and one that was preempted does not come back just to be preempted again.
        """
        while self._waiting and draft.budget_left > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting.first
            needed = self._limits.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_ids)
            # One that is alone needs no spare blocks: all are its own.
            spare = self._limits.num_spare_blocks if self._running else 0
            missing = needed + spare - self._pool.num_free
            if missing > 0:
                if not self._kept.can_give(missing, but=sequence):
                    return
                self._num_preempted += self._kept.take(missing, but=sequence)
            self._kept.remove(sequence)
            self._waiting.remove(sequence)
            self._take_blocks(sequence, needed)
            sequence.move_to(SequenceState.RUNNING)
            self._running.add(sequence)
            draft.add(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens of a running sequence, at the cost of later ones.

        Returns:
            False if the sequence is itself the last of those that could give way, and did.
        """
        missing = self._limits.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_ids)
        if missing == 0:
            return True
        if self._kept and missing > self._pool.num_free:
            self._num_preempted += self._kept.take(missing - self._pool.num_free, but=sequence)
        while missing > self._pool.num_free:
            victim = self._running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        self._take_blocks(sequence, missing)
        return True

    def _take_blocks(self, sequence: Sequence, count: int) -> None:
        block_ids = self._pool.allocate(count)
        assert block_ids is not None, f"{count} blocks wanted, {self._pool.num_free} free"
        sequence.block_ids.extend(block_ids)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting line, to its place by priority and arrival; its tokens will be computed again."""
        self._running.remove(sequence)
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.move_to(SequenceState.WAITING)
        self._waiting.add(sequence)
        self._num_preempted += 1

    # --------------------------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
        """Take in what the plan in flight gave: new tokens, ended sequences.

        Returns:
            A row for each sequence that got a token, a vector or an error, and before those, rows with what is new of
            prompts' log-probabilities; none for sequences aborted meanwhile.
        """
        assert plan is self._in_flight, "this plan is not in flight"
        assert len(result.sampled) == sum(chunk.samples for chunk in plan.chunks), "not one result a row that samples"
        self._in_flight = None
        self._num_prompt_tokens = 0
        rows = take_scores(plan, result) if result.scored else []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            outcome = next(sampled) if chunk.samples else None
            self._num_prompt_tokens += max(0, min(chunk.count, chunk.sequence.num_prompt_tokens - chunk.start))
            if chunk.sequence.state is SequenceState.FINISHED:
                continue
            chunk.sequence.num_computed_tokens += chunk.count
            if isinstance(outcome, SampledToken):
                rows.append(self._append(chunk.sequence, outcome))
            elif isinstance(outcome, PooledVector):
                self._finish(chunk.sequence, "stop")
                rows.append(pooled_row(chunk.sequence, outcome))
            elif isinstance(outcome, RowError):
                self._finish(chunk.sequence, "error")
                rows.append(final_row(chunk.sequence, error=outcome.message))
        return rows

    def _append(self, sequence: Sequence, sampled: SampledToken) -> EngineCoreOutput:
        start = sequence.next_start
        sequence.token_ids.append(sampled.token_id)
        finish_reason, stop_reason = self._find_end(sequence)
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
            goes_on=sequence.is_resumable and finish_reason is not None,
        )

    def _rest(self, sequence: Sequence) -> None:
        """An answer of a session is over: it keeps its blocks until the next input comes or others need them."""
        self._running.remove(sequence)
        sequence.move_to(SequenceState.IDLE)
        self._kept.add(sequence)

    def _find_end(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the sequence: finish reason, and the caller's stop token if it was one."""
        params = sequence.params
        token_id = sequence.token_ids[-1]
        if sequence.num_output_tokens >= params.min_tokens:
            if token_id in self._limits.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        assert params.max_tokens is not None
        if sequence.num_output_tokens >= params.max_tokens or len(sequence.token_ids) >= self._limits.max_model_len:
            return "length", None
        return None, None

    # ---------------------------------------------------------------------------------- observation

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._limits.num_blocks,
            num_preempted=self._num_preempted,
            num_prompt_tokens=self._num_prompt_tokens,
        )

    def check(self) -> None:
        """Assert all invariants. Costs a walk over everything: for tests."""
        limits = self._limits
        for queue in (self._waiting, self._running):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(set(orders)), "a queue is out of order"
        idle = [sequence for sequence in self._sequences.values() if sequence.state is SequenceState.IDLE]
        assert len(self._waiting) + len(self._running) + len(idle) == len(self._sequences), "a sequence is lost"
        for sequence in (*self._waiting, *self._running):
            assert self._sequences[sequence.request_id] is sequence
            assert sequence.num_prompt_tokens <= len(sequence.token_ids) < limits.longest(sequence.pooling)
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING
        self._kept.check([*self._waiting, *idle], limits.block_size)
        assert len(self._running) <= limits.max_num_seqs
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert 0 <= sequence.num_computed_tokens < len(sequence.token_ids)
            assert 0 < sequence.num_scored_tokens <= sequence.num_prompt_tokens
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * limits.block_size
        self._pool.check(block_id for sequence in self._sequences.values() for block_id in sequence.block_ids)
        if self._in_flight is not None:
            self._check_plan(self._in_flight)

    def _check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self._limits.max_num_batched_tokens
        assert (
            len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks) <= self._limits.max_num_seqs
        )
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            assert chunk.count > 0
            assert chunk.start == sequence.num_computed_tokens
            assert chunk.samples == (end == len(sequence.token_ids))
            if sequence.state is not SequenceState.FINISHED:
                assert sequence.state is SequenceState.RUNNING
                assert end <= len(sequence.block_ids) * self._limits.block_size
