"""Sequences of a client without credit: nothing is computed for them, and later they go on where they were."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.harness import MiniEngine, answer_alone, make_limits
from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.sequence import SequenceState
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING

PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=8)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_sequence_that_is_suspended_at_any_step_goes_on_with_the_same_tokens_and_computes_none_twice(
    num_steps: int, run_ahead: int
) -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8), run_ahead=run_ahead)
    prompts = {0: [1] * 20, 1: [2] * 20}
    for index, prompt in prompts.items():
        engine.add(make_sequence(str(index), prompt, PARAMS, client_index=index))
    for _ in range(num_steps):
        engine.step()

    engine.scheduler.suspension.suspend(1)
    engine.run(max_steps=50)
    before = list(engine.tokens["1"])
    assert engine.tokens["0"] == answer_alone(prompts[0], PARAMS)
    assert len(before) < 8

    engine.scheduler.suspension.resume(1)
    engine.run(max_steps=50)

    assert engine.tokens["1"] == answer_alone(prompts[1], PARAMS)
    assert max(engine.num_computed.values()) == 1
    assert engine.scheduler.stats().num_free_blocks == engine.limits.num_blocks


def test_suspending_and_resuming_before_the_next_step_changes_nothing() -> None:
    engine = MiniEngine()
    sequence = engine.add(make_sequence("r", [1] * 5, PARAMS))
    engine.step()

    engine.scheduler.suspension.suspend(0)
    engine.scheduler.suspension.resume(0)

    assert len(engine.step()) == 1
    assert sequence.state is SequenceState.RUNNING


def test_a_suspended_sequence_is_aborted_at_once() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("runs", [1] * 5, PARAMS))
    engine.step()
    engine.scheduler.suspension.suspend(0)
    assert engine.begin_step() is None
    engine.add(make_sequence("comes later", [1] * 5, PARAMS))

    assert engine.abort("runs").start == 1
    assert engine.abort("comes later").start == 0

    assert engine.scheduler.stats().num_free_blocks == engine.limits.num_blocks


def test_a_mean_that_is_suspended_half_way_goes_on_where_it_was() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8))
    engine.add(make_sequence("r", range(15), NO_SAMPLING, pooling=PoolingParams(pooling="mean")))
    engine.step()
    engine.scheduler.suspension.suspend(0)
    assert engine.begin_step() is None

    engine.scheduler.suspension.resume(0)
    engine.run(max_steps=2)

    assert engine.finals["r"].pooled is not None
    assert max(engine.num_computed.values()) == 1


def test_answers_that_come_back_keep_prompts_to_the_budget_beside_answers() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=32))
    for number in range(2):
        engine.add(make_sequence(f"answer {number}", [number] * 5, PARAMS))
    engine.step()
    engine.scheduler.suspension.suspend(0)
    assert engine.begin_step() is None
    engine.add(make_sequence("prompt", [3] * 30, PARAMS))
    engine.scheduler.suspension.resume(0)
    engine.max_prefill_tokens = 4

    plan = engine.begin_step()

    assert plan is not None
    assert {chunk.sequence.request_id: chunk.count for chunk in plan.chunks if not chunk.is_decode} == {"prompt": 3}
