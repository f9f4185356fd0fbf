"""An engine in miniature for tests: a scheduler over a FakeExecutor, every invariant checked after every change."""

from __future__ import annotations

from collections import Counter, deque

from tests.support.sequences import make_sequence
from trio_llm.config import FakeEngineConfig
from trio_llm.engine.executor.base import LaunchedStep
from trio_llm.engine.executor.fake import FakeExecutor
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreOutput, LogprobRow

BLOCK_SIZE = 4
LOGITS_WIDTH = 16


def make_limits(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    eos_token_ids: tuple[int, ...] = (),
    max_prompt_logprob_cost: int = 1000,
    keeps_cache: bool = True,
    logs_kv_events: bool = False,
) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        logits_width=LOGITS_WIDTH,
        max_prompt_logprob_cost=max_prompt_logprob_cost,
        keeps_cache=keeps_cache,
        logs_kv_events=logs_kv_events,
    )


class MiniEngine:
    """Steps a scheduler and keeps the tokens and the last row of every request, as a front end would.

    Args:
        run_ahead: steps that are launched before the one before them is retired.
    """

    def __init__(
        self, limits: SchedulerLimits | None = None, fake: FakeEngineConfig | None = None, *, run_ahead: int = 0
    ) -> None:
        self.limits = limits or make_limits()
        fake = fake or FakeEngineConfig(logits_width=LOGITS_WIDTH, eos_token_ids=self.limits.eos_token_ids)
        self.scheduler = Scheduler(self.limits)
        self.executor = FakeExecutor(
            fake, num_blocks=self.limits.num_blocks, model_dir="nowhere", block_size=BLOCK_SIZE
        )
        self.run_ahead = run_ahead
        self.in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.tokens: dict[str, list[int]] = {}
        """By request: tokens of its answer, those generated before included."""
        self.finals: dict[str, EngineCoreOutput] = {}
        self.prompt_logprobs: dict[str, list[LogprobRow]] = {}
        """By request: prompt log-probabilities so far."""
        self.max_prefill_tokens: int | None = None
        """What plans may have beside tokens of answers."""
        self.num_computed: Counter[tuple[str, int]] = Counter()
        """How often a position of a request was computed."""

    def num_starts(self, request_id: str) -> int:
        """How often a request was computed from its first token on."""
        return self.num_computed[request_id, 0]

    def add(self, sequence: Sequence) -> Sequence:
        self.tokens[sequence.request_id] = sequence.token_ids[sequence.num_prompt_tokens :]
        self.prompt_logprobs[sequence.request_id] = []
        self.scheduler.add(sequence)
        self.scheduler.check()
        return sequence

    def abort(self, request_id: str) -> EngineCoreOutput:
        row = self.scheduler.abort(request_id)
        self.scheduler.check()
        return row

    def begin_step(self) -> StepPlan | None:
        """Schedule and launch; `end_step` commits. None if there is nothing to do before that."""
        running = set(self.scheduler._sequences.running)
        plan = self.scheduler.schedule(max_prefill_tokens=self.max_prefill_tokens)
        self.scheduler.check()
        if plan is None:
            return None
        self.check_prompt_logprob_budget(plan)
        if self.max_prefill_tokens is not None:
            self.check_prefill_budget(plan, running)
        for chunk in plan.chunks:
            request_id = chunk.sequence.request_id
            self.num_computed.update((request_id, chunk.start + i) for i in range(chunk.count))
        self.in_flight.append((plan, self.executor.launch(plan)))
        return plan

    def check_prompt_logprob_budget(self, plan: StepPlan) -> None:
        cost = sum(
            (20 + (chunk.sequence.params.prompt_logprobs or 0)) * len(chunk.prompt_logprob_positions)
            for chunk in plan.chunks
        )
        assert cost <= self.limits.max_prompt_logprob_cost

    def check_prefill_budget(self, plan: StepPlan, running: set[Sequence]) -> None:
        """Beside sequences that decoded before this step, prefills keep to the budget. The last token of a prompt is
        always computed, and so is the token of an answer that was preempted or recovered."""
        if any(chunk.is_decode and chunk.sequence in running for chunk in plan.chunks):
            prefills = [chunk.count for chunk in plan.chunks if not (chunk.samples and chunk.count == 1)]
            assert sum(prefills) <= (self.max_prefill_tokens or 0)

    def end_step(self) -> list[EngineCoreOutput]:
        """Commit the oldest step in flight."""
        plan, launched = self.in_flight.popleft()
        rows = self.scheduler.commit(plan, launched.wait())
        self.scheduler.check()
        self.take(rows)
        return rows

    def step(self) -> list[EngineCoreOutput]:
        """Launch a step and end one, as `EngineCore` does."""
        plan = self.begin_step()
        assert plan is not None or self.in_flight, "nothing to do"
        if plan is None or len(self.in_flight) > self.run_ahead:
            return self.end_step()
        return []

    def run(self, *, max_steps: int) -> None:
        """Step until nothing is left, which must be so after `max_steps`."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {max_steps} steps"

    def take(self, rows: list[EngineCoreOutput]) -> None:
        for row in rows:
            assert row.request_id not in self.finals, "a row after the last one"
            assert row.start == len(self.tokens[row.request_id]), "a gap or a repeat"
            self.tokens[row.request_id] += row.new_token_ids
            if row.prompt_logprobs is not None:
                assert row.prompt_logprobs_start == 1 + len(self.prompt_logprobs[row.request_id]), "a gap or a repeat"
                self.prompt_logprobs[row.request_id] += row.prompt_logprobs
            if row.finish_reason is not None and not row.goes_on:
                self.finals[row.request_id] = row


def answer_alone(prompt: list[int], params: SamplingParams) -> list[int]:
    """What a prompt gives in an engine of its own with room and budget for everything."""
    engine = MiniEngine(make_limits(num_blocks=256, max_num_batched_tokens=1024, max_model_len=1024))
    engine.add(make_sequence("alone", prompt, params))
    engine.run(max_steps=1024)
    return engine.tokens["alone"]
