"""FakeExecutor: its tokens and vectors follow from the request alone, and its faults come as they are asked for."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.sequences import make_sequence
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.executor.fake import FakeExecutor, load_fake
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, SampledToken, ScheduledChunk, StepPlan
from trio_llm.sampling import SamplingParams

BLOCK_SIZE = 4


def make_executor(fake: FakeEngineConfig | None = None, *, num_blocks: int = 16) -> FakeExecutor:
    fake = fake or FakeEngineConfig(eos_token_ids=(0,))
    return FakeExecutor(fake, num_blocks=num_blocks, model_dir="nowhere", block_size=BLOCK_SIZE)


def chunk(sequence: Sequence, start: int, count: int) -> ScheduledChunk:
    return ScheduledChunk(sequence, start, count, samples=start + count == len(sequence.token_ids))


def run(executor: Executor, *chunks: ScheduledChunk) -> list[SampledToken | PooledVector | RowError]:
    return list(executor.execute(StepPlan(chunks)).sampled)


def sample(executor: Executor, sequence: Sequence, start: int, count: int) -> SampledToken:
    (outcome,) = run(executor, chunk(sequence, start, count))
    assert isinstance(outcome, SampledToken)
    return outcome


def generate(executor: Executor, sequence: Sequence, count: int) -> list[int]:
    start = 0
    for _ in range(count):
        end = len(sequence.token_ids)
        sequence.token_ids.append(sample(executor, sequence, start, end - start).token_id)
        start = end
    return sequence.token_ids[sequence.num_prompt_tokens :]


# -------------------------------------------------------------------------------------------- tokens


def test_the_same_prompt_gives_the_same_tokens_in_any_executor_and_any_blocks() -> None:
    first = generate(make_executor(), make_sequence("a", [5, 6], block_ids=[0, 1, 2, 3]), 10)
    second = generate(make_executor(), make_sequence("b", [5, 6], block_ids=[9, 3, 7, 4]), 10)

    assert first == second
    assert len(set(first)) > 1


@pytest.mark.parametrize("prompt", [[5, 7], [6, 5], [5], [5, 6, 0]])
def test_another_prompt_gives_other_tokens(prompt: list[int]) -> None:
    executor = make_executor()
    one = generate(executor, make_sequence("a", [5, 6], block_ids=[0, 1, 2]), 8)

    assert generate(executor, make_sequence("b", prompt, block_ids=[3, 4, 5]), 8) != one


def test_the_seed_changes_the_tokens_above_temperature_0_alone() -> None:
    def run_with(**params: Any) -> list[int]:
        return generate(
            make_executor(), make_sequence("a", [5, 6], SamplingParams(max_tokens=99, **params), block_ids=[0, 1, 2]), 8
        )

    sampled = [run_with(seed=seed) for seed in (7, 7, 8, -(2**63))]
    assert sampled[0] == sampled[1]
    assert len(set(map(tuple, sampled))) == 3
    assert run_with(seed=7, temperature=0) == run_with(seed=8, temperature=0) == run_with(temperature=0)


def test_chunks_do_not_change_the_tokens() -> None:
    whole = sample(make_executor(), make_sequence("a", [1, 2, 3, 4, 5, 6], block_ids=[0, 1]), 0, 6)
    executor, sequence = make_executor(), make_sequence("a", [1, 2, 3, 4, 5, 6], block_ids=[0, 1])

    assert run(executor, chunk(sequence, 0, 1)) == []
    assert run(executor, chunk(sequence, 1, 4)) == []
    assert run(executor, chunk(sequence, 5, 1)) == [whole]


def test_tokens_that_came_before_a_recovery_do_not_change_those_after_it() -> None:
    whole = generate(make_executor(), make_sequence("a", [1, 2], block_ids=[0, 1, 2]), 8)
    recovered = make_sequence("a", [1, 2], block_ids=[0, 1, 2])
    recovered.token_ids += whole[:5]

    assert sample(make_executor(), recovered, 0, 7).token_id == whole[5]


def test_no_token_is_an_end_of_sequence_and_each_is_below_the_width() -> None:
    executor = make_executor(FakeEngineConfig(logits_width=4, eos_token_ids=(1, 3)))

    assert set(generate(executor, make_sequence("a", [5], block_ids=list(range(16))), 60)) == {0, 2}


def test_a_script_is_repeated_with_whatever_is_in_it() -> None:
    executor = make_executor(FakeEngineConfig(script=(7, 0), eos_token_ids=(0,)))

    assert generate(executor, make_sequence("a", [5, 6], block_ids=[0, 1, 2]), 5) == [7, 0, 7, 0, 7]


# ------------------------------------------------------------------------------------------ logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_hold_the_sampled_token_then_the_likeliest_best_first(num_top: int) -> None:
    executor = make_executor()
    sequence = make_sequence("a", [5], SamplingParams(max_tokens=99, logprobs=num_top), block_ids=[0, 1, 2])
    for start in range(6):
        sampled = sample(executor, sequence, start, 1)
        sequence.token_ids.append(sampled.token_id)
        row = sampled.logprobs
        assert row is not None
        assert row.token_ids[0] == sampled.token_id
        assert len(row.token_ids) == len(row.logprobs) == 1 + num_top
        top = row.token_ids[1:]
        assert len(set(top)) == num_top
        assert row.logprobs[1:] == sorted(row.logprobs[1:], reverse=True)
        assert sum(math.exp(logprob) for logprob in row.logprobs[1:]) < 1
        if row.sampled_rank <= num_top:
            assert top[row.sampled_rank - 1] == sampled.token_id
            assert row.logprobs[row.sampled_rank] == row.logprobs[0]


def test_no_logprobs_come_unless_asked_for() -> None:
    assert sample(make_executor(), make_sequence("a", [5], block_ids=[0]), 0, 1).logprobs is None


def test_there_are_never_more_alternatives_than_other_tokens() -> None:
    executor = make_executor(FakeEngineConfig(logits_width=3))
    row = sample(
        executor, make_sequence("a", [5], SamplingParams(max_tokens=99, logprobs=20), block_ids=[0]), 0, 1
    ).logprobs

    assert row is not None
    assert set(row.token_ids) <= {0, 1, 2}
    assert len(set(row.token_ids[1:])) == len(row.token_ids[1:]) == 2


# -------------------------------------------------------------------------------------------- faults


def test_the_chosen_step_fails_and_those_before_it_do_not() -> None:
    executor, sequence = make_executor(FakeEngineConfig(fail_at_step=3)), make_sequence("a", [5], block_ids=[0])
    generate(executor, sequence, 2)

    with pytest.raises(RuntimeError, match="step 3"):
        run(executor, chunk(sequence, 2, 1))


def test_faults_hit_the_prompts_that_start_with_the_chosen_tokens_and_no_others() -> None:
    executor = make_executor(FakeEngineConfig(faulty_token_prompt=7, failing_row_prompt=8))
    sequences = [make_sequence(str(i), [first, 7, 8], block_ids=[i]) for i, first in enumerate((6, 7, 8))]

    fine, faulty, failing = run(executor, *(chunk(sequence, 0, 3) for sequence in sequences))

    assert isinstance(fine, SampledToken)
    assert 0 <= fine.token_id < 256
    assert faulty == SampledToken(-1)
    assert isinstance(failing, RowError)
    assert "token 8" in failing.message


# -------------------------------------------------------------------------------- what a plan must obey


def test_a_position_without_a_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="no block"):
        run(make_executor(), chunk(make_sequence("a", [1] * 5, block_ids=[0]), 0, 5))


@pytest.mark.parametrize("start", [1, 3])
def test_a_position_that_is_skipped_or_computed_twice_is_refused(start: int) -> None:
    executor, sequence = make_executor(), make_sequence("a", [1] * 8, block_ids=[0, 1])
    run(executor, chunk(sequence, 0, 2))

    with pytest.raises(AssertionError, match="at 2"):
        run(executor, chunk(sequence, start, 2))


def test_beginning_again_is_allowed_also_in_the_same_blocks() -> None:
    executor, sequence = make_executor(), make_sequence("a", [1, 2, 3], block_ids=[0, 1])
    first = generate(executor, sequence, 3)
    del sequence.token_ids[3:]

    assert generate(executor, sequence, 3) == first


def test_a_sequence_whose_block_another_has_taken_is_refused() -> None:
    executor = make_executor()
    robbed = make_sequence("a", [1] * 7, block_ids=[0, 1])
    run(executor, chunk(robbed, 0, 6))
    run(executor, chunk(make_sequence("thief", [2], block_ids=[0]), 0, 1))

    with pytest.raises(AssertionError, match="something else"):
        run(executor, chunk(robbed, 6, 1))


def test_two_sequences_in_one_block_are_refused_in_the_same_step_too() -> None:
    one, two = make_sequence("a", [1, 2], block_ids=[0]), make_sequence("b", [1, 2, 3], block_ids=[0])

    with pytest.raises(AssertionError, match="overwritten"):
        run(make_executor(), chunk(one, 0, 2), chunk(two, 0, 3))


def test_a_block_with_the_same_tokens_may_be_shared_in_the_step_that_fills_it() -> None:
    executor = make_executor()
    one, two = (
        make_sequence("a", [1, 2, 3, 4, 5], block_ids=[0, 1]),
        make_sequence("b", [1, 2, 3, 4, 6], block_ids=[0, 2]),
    )

    outcomes = run(executor, chunk(one, 0, 5), chunk(two, 4, 1))

    assert outcomes[1] == sample(make_executor(), make_sequence("a", [1, 2, 3, 4, 6], block_ids=[3, 4]), 0, 5)


def test_a_block_with_other_tokens_may_not_be_shared() -> None:
    executor = make_executor()
    run(executor, chunk(make_sequence("a", [1, 2, 3, 4, 5], block_ids=[0, 1]), 0, 5))

    with pytest.raises(AssertionError, match="something else"):
        run(executor, chunk(make_sequence("b", [1, 2, 3, 5, 6], block_ids=[0, 2]), 4, 1))


def test_a_step_computes_a_token_that_the_step_before_sampled_and_the_host_does_not_have() -> None:
    expected = generate(make_executor(), make_sequence("a", [5, 6], block_ids=[0, 1]), 3)
    executor, sequence = make_executor(), make_sequence("a", [5, 6], block_ids=[0, 1])

    launched = [executor.launch(StepPlan((ScheduledChunk(sequence, 0, 2, samples=True),)))]
    launched.append(executor.launch(StepPlan((ScheduledChunk(sequence, 2, 1, samples=True),))))

    sampled = [outcome for step in launched for outcome in step.wait().sampled]
    assert sampled == [SampledToken(token_id) for token_id in expected[:2]]


def test_a_step_that_is_too_far_ahead_is_refused() -> None:
    executor, sequence = make_executor(), make_sequence("a", [5, 6], block_ids=[0, 1])
    executor.launch(StepPlan((ScheduledChunk(sequence, 0, 2, samples=True),)))

    with pytest.raises(AssertionError, match="ahead"):
        executor.launch(StepPlan((ScheduledChunk(sequence, 3, 1, samples=True),)))


def test_a_block_twice_in_a_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="twice"):
        run(make_executor(), chunk(make_sequence("a", [1] * 5, block_ids=[0, 0]), 0, 5))


@pytest.mark.parametrize("wrong", [True, False])
def test_a_chunk_that_samples_elsewhere_than_at_the_last_token_is_refused(wrong: bool) -> None:
    sequence = make_sequence("a", [1, 2], block_ids=[0])

    with pytest.raises(AssertionError, match="sampling"):
        run(make_executor(), ScheduledChunk(sequence, 0, 1 if wrong else 2, samples=wrong))


# ------------------------------------------------------------------------------------------- loading


def test_loading_reports_progress_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    record: Callable[[float], None] = slept.append
    monkeypatch.setattr(time, "sleep", record)
    reports: list[tuple[str, int, int]] = []
    config = EngineConfig(fake=FakeEngineConfig(start_s=0.5))

    load_fake(config, lambda *report: reports.append(report), model_dir="nowhere")

    assert reports == [("load", done, 10) for done in range(11)]
    assert math.isclose(sum(slept), 0.5)


def test_each_step_takes_the_chosen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    record: Callable[[float], None] = slept.append
    monkeypatch.setattr(time, "sleep", record)

    generate(make_executor(FakeEngineConfig(step_s=0.25)), make_sequence("a", [1], block_ids=[0]), 2)

    assert slept == [0.25, 0.25]


@pytest.mark.parametrize(
    ("config", "num_blocks", "max_model_len"),
    [
        (EngineConfig(fake=FakeEngineConfig()), 512, 4096),
        (EngineConfig(fake=FakeEngineConfig(), max_model_len=100), 512, 100),
        (EngineConfig(fake=FakeEngineConfig(), num_gpu_blocks_override=3), 3, 96),
        (EngineConfig(fake=FakeEngineConfig(), num_gpu_blocks_override=3, max_model_len=100), 3, 96),
    ],
)
def test_the_models_length_always_fits_the_cache(config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
    info = load_fake(config, lambda *_: None, model_dir="/some/where").info

    assert (info.num_blocks, info.block_size, info.max_model_len) == (num_blocks, 32, max_model_len)
    assert (info.model_dir, info.device, info.tasks) == ("/some/where", "fake", ("generate", "embed", "score"))
    assert info.logits_width == 256


def test_the_fake_and_the_scheduler_import_no_torch() -> None:
    program = (
        "import sys, trio_llm.engine.executor.fake, trio_llm.engine.scheduling.scheduler;"
        "sys.exit(bool({'torch', 'transformers', 'trio', 'zmq'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
