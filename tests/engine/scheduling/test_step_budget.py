"""StepBudget with made-up devices: the budget beside answers follows what steps were measured to take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.engine.scheduling.step_budget import StepBudget

BLOCK = 32
MAX_TOKENS = 512
TARGET_S = 0.2

Device = Callable[[int], float]
"""Seconds of a step by its prompt tokens."""


def slow_cpu(num_prefill_tokens: int) -> float:
    return 0.03 + 0.004 * num_prefill_tokens


def fast_gpu(num_prefill_tokens: int) -> float:
    return 0.005 + 0.00002 * num_prefill_tokens


def a_budget(target_s: float = TARGET_S, max_tokens: int = MAX_TOKENS) -> StepBudget:
    return StepBudget(target_s, block_size=BLOCK, max_tokens=max_tokens)


def run(budget: StepBudget, device: Device, *, num_steps: int, decode_every: int = 0) -> list[tuple[int, float]]:
    """Steps of a long prompt beside answers: tokens and seconds of each. Every so often one has no prompt tokens."""
    steps = []
    for number in range(num_steps):
        is_decode_only = bool(decode_every) and number % decode_every == 0
        count = 0 if is_decode_only else budget.num_prefill_tokens
        seconds = device(count)
        budget.observe(count, seconds, has_decodes=True)
        steps.append((count, seconds))
    return steps


def test_before_anything_is_measured_the_budget_is_the_largest() -> None:
    assert a_budget().num_prefill_tokens == MAX_TOKENS


def test_on_a_slow_cpu_one_measured_prompt_is_enough_to_keep_the_target() -> None:
    budget = a_budget()
    budget.observe(512, slow_cpu(512), has_decodes=False)

    steps = run(budget, slow_cpu, num_steps=50, decode_every=10)

    assert max(seconds for _, seconds in steps) <= TARGET_S
    assert {count for count, _ in steps} == {0, BLOCK}


def test_the_first_answer_of_all_is_disturbed_by_one_long_step_at_most() -> None:
    budget = a_budget()
    budget.observe(0, slow_cpu(0), has_decodes=True)

    first, *others = run(budget, slow_cpu, num_steps=50)

    assert first[1] > TARGET_S
    assert max(seconds for _, seconds in others) <= TARGET_S


def test_on_a_fast_device_the_budget_stays_the_largest() -> None:
    steps = run(a_budget(), fast_gpu, num_steps=50, decode_every=7)

    assert {count for count, _ in steps} == {0, MAX_TOKENS}


def test_a_device_that_becomes_fast_again_gets_the_whole_budget_back() -> None:
    budget = a_budget()
    run(budget, slow_cpu, num_steps=20, decode_every=5)
    assert budget.num_prefill_tokens == BLOCK

    run(budget, fast_gpu, num_steps=40, decode_every=5)

    assert budget.num_prefill_tokens == MAX_TOKENS


def test_one_step_that_was_held_up_is_forgotten() -> None:
    budget = a_budget()
    run(budget, fast_gpu, num_steps=10)

    budget.observe(512, 30.0, has_decodes=True)
    assert budget.num_prefill_tokens == BLOCK
    run(budget, fast_gpu, num_steps=40)

    assert budget.num_prefill_tokens == MAX_TOKENS


@pytest.mark.parametrize("base_s", [0.2, 0.25, 10.0])
def test_answers_that_take_the_whole_target_by_themselves_leave_one_block(base_s: float) -> None:
    budget = a_budget()
    budget.observe(512, 1.0, has_decodes=False)
    budget.observe(0, base_s, has_decodes=True)

    assert budget.num_prefill_tokens == BLOCK


def test_the_base_of_many_answers_does_not_count_as_time_of_the_prompt() -> None:
    budget = a_budget()
    budget.observe(0, 0.15, has_decodes=True)
    budget.observe(64, 0.15 + 64 * 0.0001, has_decodes=True)

    assert budget.num_prefill_tokens == 480, "0.05 s at 0.1 ms per token, in whole blocks"


def test_a_largest_budget_below_one_block_is_kept() -> None:
    budget = a_budget(max_tokens=20)
    budget.observe(20, 5.0, has_decodes=False)

    assert budget.num_prefill_tokens == 20


@given(
    steps=st.lists(st.tuples(st.integers(0, 512), st.floats(0, 100), st.booleans()), max_size=30),
    max_tokens=st.integers(1, 2000),
)
def test_whatever_is_measured_the_budget_is_whole_blocks_within_its_bounds(
    steps: list[tuple[int, float, bool]], max_tokens: int
) -> None:
    budget = a_budget(max_tokens=max_tokens)
    for count, seconds, has_decodes in steps:
        budget.observe(count, seconds, has_decodes=has_decodes)

        tokens = budget.num_prefill_tokens
        assert min(BLOCK, max_tokens) <= tokens <= max_tokens
        assert tokens % BLOCK == 0 or tokens == max_tokens
