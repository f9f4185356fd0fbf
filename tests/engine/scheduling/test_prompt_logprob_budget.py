"""Prompt log-probabilities that one step computes are bounded by cost, and all of them come all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling.harness import MiniEngine, make_limits
from tests.support.sequences import make_sequence
from trio_llm.config import EngineConfig
from trio_llm.engine.scheduling.limits import SchedulerLimits, prompt_logprob_cost
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import LogprobRow, ModelConfig

PROMPT = [(7 * i) % 16 for i in range(60)]


def scoring(num_top: int = 0, max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, prompt_logprobs=num_top)


def an_engine(cost: int) -> MiniEngine:
    return MiniEngine(make_limits(max_prompt_logprob_cost=cost, max_num_batched_tokens=64, max_model_len=128))


def chunks(plan: StepPlan | None) -> dict[str, int]:
    """Tokens of each sequence in a plan."""
    assert plan is not None
    return {chunk.sequence.request_id: chunk.count for chunk in plan.chunks}


def test_a_chunk_is_cut_to_what_a_step_may_spend_on_its_log_probabilities() -> None:
    engine = an_engine(cost=100)
    engine.add(make_sequence("a", PROMPT, scoring()))

    assert chunks(engine.begin_step()) == {"a": 5}, "five positions at 20 each"


def test_alternatives_count() -> None:
    engine = an_engine(cost=100)
    engine.add(make_sequence("a", PROMPT, scoring(20)))

    assert chunks(engine.begin_step()) == {"a": 2}, "two positions at 40 each"


def test_a_prompt_without_log_probabilities_is_not_cut_and_does_not_wait_behind_one_that_is() -> None:
    engine = an_engine(cost=100)
    for i, (name, params) in enumerate([("first", scoring()), ("second", scoring()), ("plain", None)]):
        engine.add(make_sequence(name, [i, *PROMPT[:40]], params))

    assert chunks(engine.begin_step()) == {"first": 5, "plain": 41}


def test_the_last_positions_and_the_end_of_the_prompt_come_in_one_step() -> None:
    """The last token's row gives the answer and no log-probability of the prompt."""
    engine = an_engine(cost=100)
    engine.add(make_sequence("a", PROMPT[:6], scoring()))

    assert chunks(engine.begin_step()) == {"a": 6}
    engine.end_step()
    assert len(engine.prompt_logprobs["a"]) == 5
    assert engine.finals["a"].finish_reason == "length"


def test_log_probabilities_that_are_out_cost_nothing_when_a_preempted_prompt_is_computed_again() -> None:
    engine = an_engine(cost=100)
    engine.add(make_sequence("a", PROMPT, scoring()))
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt_all()

    assert chunks(engine.begin_step()) == {"a": 25}, "20 tokens again, and five new positions"


@given(
    cost=st.integers(40, 400),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    tops=st.lists(st.sampled_from([None, 0, 3, 20]), min_size=4, max_size=4),
    run_ahead=st.integers(0, 1),
)
def test_neither_tokens_nor_log_probabilities_depend_on_the_budget(
    cost: int, lengths: list[int], tops: list[int | None], run_ahead: int
) -> None:
    def serve(cost: int) -> tuple[dict[str, list[int]], dict[str, list[LogprobRow]]]:
        engine = an_engine(cost)
        engine.run_ahead = run_ahead
        for i, (length, top) in enumerate(zip(lengths, tops, strict=False)):
            params = SamplingParams(temperature=0, seed=0, max_tokens=4, prompt_logprobs=top)
            engine.add(make_sequence(str(i), [i, *PROMPT[:length]], params))
        engine.run(max_steps=1000)
        return engine.tokens, engine.prompt_logprobs

    assert serve(cost) == serve(10**6)


@pytest.mark.parametrize(("device", "num_positions"), [("cpu", 64), ("fake", 64), ("cuda:0", 512)])
def test_by_default_a_step_affords_so_many_positions_with_20_alternatives(device: str, num_positions: int) -> None:
    model = ModelConfig(
        model_dir="/m",
        max_model_len=64,
        logits_width=16,
        num_blocks=2,
        block_size=32,
        dtype="float32",
        device=device,
        eos_token_ids=(),
        tasks=("generate",),
        versions={},
    )

    limits = SchedulerLimits.of(model, EngineConfig())

    assert limits.max_prompt_logprob_cost // prompt_logprob_cost(20) == num_positions
