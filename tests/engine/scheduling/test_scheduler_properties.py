"""Random traffic: whatever comes and goes, tokens are those of a request alone, and nothing is lost or starves."""

from __future__ import annotations

from functools import lru_cache, partial

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.scheduling.harness import BLOCK_SIZE, MiniEngine, answer_alone, make_limits
from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams


@lru_cache(maxsize=4096)
def expected_answer(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return answer_alone(list(prompt), params)


@st.composite
def limits_strategy(draw: st.DrawFn) -> SchedulerLimits:
    """Tiny caches and budgets, from one token a sequence up."""
    num_blocks = draw(st.integers(2, 12))
    max_num_seqs = draw(st.integers(1, 5))
    return make_limits(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        max_model_len=draw(st.integers(BLOCK_SIZE, num_blocks * BLOCK_SIZE)),
        max_prompt_logprob_cost=draw(st.integers(40, 200)),
        keeps_cache=draw(st.booleans()),
    )


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 12),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (1, 2, 3, 4)]),
    prompt_logprobs=st.sampled_from([None, None, 0, 20]),
)
prompts = st.lists(st.integers(0, 3), min_size=1, max_size=24)


class Traffic(RuleBasedStateMachine):
    """Requests come, are aborted and expire at any phase of any step; the harness checks invariants throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: MiniEngine
        self.sequences: dict[str, Sequence] = {}
        self.num_given: dict[str, int] = {}
        """Tokens of answers that requests came with."""
        self.gone: set[str] = set()
        """Aborted or expired."""
        self.now_s = 0.0

    @initialize(limits=limits_strategy(), run_ahead=st.integers(0, 1))
    def start(self, limits: SchedulerLimits, run_ahead: int) -> None:
        self.engine = MiniEngine(limits, run_ahead=run_ahead)

    @rule(
        prompt=prompts,
        params=params_strategy,
        priority=st.integers(0, 2),
        patience_s=st.none() | st.integers(0, 3),
        num_generated=st.integers(0, 4),
        cache_salt=st.sampled_from([None, None, "salt"]),
    )
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        patience_s: int | None,
        num_generated: int,
        cache_salt: str | None,
    ) -> None:
        prompt = prompt[: self.engine.limits.max_model_len - 1]
        answer = self.answer(prompt, params)
        given = answer[: min(num_generated, len(answer) - 1)]
        sequence = make_sequence(
            f"r{len(self.sequences)}",
            prompt,
            params,
            generated=given,
            next_prompt_logprob=len(prompt) if given else 1,
            priority=priority,
            expires_at=None if patience_s is None else self.now_s + patience_s,
            cache_salt=cache_salt,
        )
        self.num_given[sequence.request_id] = len(given)
        self.sequences[sequence.request_id] = self.engine.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sequences)))
        was_over = request_id in self.engine.finals or request_id in self.gone

        row = self.engine.abort(request_id)

        assert row.finish_reason == "abort"
        assert row.start == (0 if was_over else len(self.engine.tokens[request_id]))
        if not was_over:
            self.gone.add(request_id)

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        for row in self.engine.scheduler.take_expired(self.now_s):
            sequence = self.sequences[row.request_id]
            assert self.engine.num_starts(row.request_id) == 0
            assert sequence.expires_at is not None
            assert sequence.expires_at <= self.now_s
            self.gone.add(row.request_id)
        self.engine.scheduler.check()

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.run_ahead)
    @rule()
    def begin_step(self) -> None:
        had_work = self.engine.scheduler.has_unfinished
        plan = self.engine.begin_step()
        assert plan is None or had_work
        assert plan is not None or self.engine.in_flight or not had_work

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def end_step(self) -> None:
        reported = {row.request_id for row in self.engine.end_step()}
        assert not reported & self.gone

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.run_ahead)
    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.scheduler.has_unfinished or self.engine.in_flight:
                self.engine.step()

    @rule(count=st.none() | st.integers(1, 8))
    def the_budget_beside_answers_changes(self, count: int | None) -> None:
        self.engine.max_prefill_tokens = count

    @rule()
    def the_cache_is_reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()
        self.engine.scheduler.check()

    def answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return expected_answer(tuple(prompt), params)[: self.engine.limits.max_model_len - len(prompt)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.in_flight:
            self.end_step()
        # The first of all waits until those that run are through, then is served without a pause.
        left = [s for s in self.sequences.values() if s.finish_reason is None]
        num_tokens = sum(s.num_prompt_tokens + (s.params.max_tokens or 0) for s in left)
        self.engine.run(max_steps=2 * len(left) * num_tokens)

        assert self.engine.scheduler.stats().num_free_blocks == self.engine.limits.num_blocks
        for request_id, sequence in self.sequences.items():
            answer = self.answer(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params)
            tokens = self.engine.tokens[request_id]
            if request_id in self.gone:
                assert request_id not in self.engine.finals
                assert tokens == answer[: len(tokens)]
            else:
                assert tokens == answer
                self.check_prompt_logprobs(sequence)
            self.check_that_nothing_is_computed_twice(sequence)

    def check_prompt_logprobs(self, sequence: Sequence) -> None:
        """They are whole. A request that came with tokens of its answer got them before."""
        is_wanted = sequence.params.prompt_logprobs is not None and not self.num_given[sequence.request_id]
        expected = sequence.num_prompt_tokens - 1 if is_wanted else 0
        assert len(self.engine.prompt_logprobs[sequence.request_id]) == expected

    def check_that_nothing_is_computed_twice(self, sequence: Sequence) -> None:
        """That nothing is left out is seen to by the executor, which refuses to read what is not there."""
        counts = [self.engine.num_computed[sequence.request_id, i] for i in range(len(sequence.token_ids))]
        assert max(counts) <= 1 + sequence.num_preemptions
        if not self.engine.limits.keeps_cache and sequence.request_id not in self.gone:
            assert counts[:-1] == [counts[0]] * (len(counts) - 1) or sequence.num_preemptions
            assert min(counts[:-1]) >= 1


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


def answers(
    limits: SchedulerLimits, requests: list[tuple[list[int], SamplingParams]], *, run_ahead: int = 0
) -> list[list[int]]:
    engine = MiniEngine(limits, run_ahead=run_ahead)
    for i, (prompt, params) in enumerate(requests):
        engine.add(make_sequence(str(i), prompt, params))
    engine.run(max_steps=10_000)
    return [engine.tokens[str(i)] for i in range(len(requests))]


requests_strategy = st.lists(st.tuples(prompts, params_strategy), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(requests=requests_strategy, run_ahead=st.integers(0, 1), keeps_cache=st.booleans())
def test_neither_cache_size_nor_chunks_nor_batch_nor_running_ahead_change_a_token(
    requests: list[tuple[list[int], SamplingParams]], run_ahead: int, keeps_cache: bool
) -> None:
    alone = [expected_answer(tuple(prompt), params) for prompt, params in requests]

    make = partial(make_limits, keeps_cache=keeps_cache)
    tiny_cache = make(num_blocks=9, max_model_len=36, max_num_batched_tokens=1024)
    tiny_budget = make(num_blocks=256, max_num_seqs=2, max_num_batched_tokens=2)
    everything_tiny = make(num_blocks=9, max_model_len=36, max_num_seqs=3, max_num_batched_tokens=3)
    plenty = make(num_blocks=256, max_num_batched_tokens=1024)
    for limits in (tiny_cache, tiny_budget, everything_tiny, plenty):
        assert answers(limits, requests, run_ahead=run_ahead) == alone


@settings(max_examples=20, deadline=None)
@given(num_sequences=st.integers(2, 4), max_tokens=st.integers(12, 18))
def test_sequences_that_outgrow_the_cache_together_preempt_and_still_end_with_the_same_tokens(
    num_sequences: int, max_tokens: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    engine = MiniEngine(make_limits(num_blocks=7, max_model_len=28))
    prompts = [[i] * 5 for i in range(num_sequences)]
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(str(i), prompt, params))

    engine.run(max_steps=num_sequences * num_sequences * (5 + max_tokens))

    assert engine.scheduler.stats().num_preempted > 0
    assert [engine.tokens[str(i)] for i in range(num_sequences)] == [
        expected_answer(tuple(prompt), params) for prompt in prompts
    ]
