"""The pooler: a vector follows from its own sequence alone, not from its chunks or the sequences beside it."""

from __future__ import annotations

import gc
import struct
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import PooledVector, RowError, ScheduledChunk, StepPlan
from trio_llm.engine.worker.pooler import Pooler
from trio_llm.pooling import PoolingParams
from trio_llm.wire.messages import NO_SAMPLING

WIDTH = 6
NO_LOGITS = torch.empty(0, 3)
LAST, MEAN = PoolingParams(pooling="last"), PoolingParams(pooling="mean")


def of_length(length: int, pooling: PoolingParams | None) -> Sequence:
    return make_sequence(f"{length}", [1] * length, NO_SAMPLING, pooling=pooling)


def chunk(sequence: Sequence, start: int, end: int) -> ScheduledChunk:
    return ScheduledChunk(sequence, start, end - start, samples=end == len(sequence.token_ids))


def states(length: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))


def numbers(result: PooledVector | RowError) -> torch.Tensor:
    assert isinstance(result, PooledVector), result
    return torch.tensor(struct.unpack(f"<{len(result.data) // 4}f", result.data))


def pool(
    pooler: Pooler, plan: StepPlan, hidden: torch.Tensor, logits: torch.Tensor = NO_LOGITS
) -> list[PooledVector | RowError]:
    """The vectors of a step whose tokens lie in the plan's order."""
    first_tokens = [0, *accumulate(chunk.count for chunk in plan.chunks)][:-1]
    pending = pooler.launch(plan, hidden, logits, first_tokens=first_tokens)
    return [] if pending is None else pending.wait()


def pool_in_chunks(pooler: Pooler, sequence: Sequence, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The vector, from chunks that end at `cuts` and at the end of the sequence."""
    start, results = 0, []
    for end in [*cuts, len(sequence.token_ids)]:
        results += pool(pooler, StepPlan((chunk(sequence, start, end),)), hidden[start:end])
        start = end
    (result,) = results
    return numbers(result)


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 60), cuts=st.sets(st.integers(1, 59)), pooling=st.sampled_from([LAST, MEAN]))
def test_the_cut_into_chunks_does_not_change_a_vector(length: int, cuts: set[int], pooling: PoolingParams) -> None:
    hidden = states(length)
    whole = hidden[-1] if pooling is LAST else hidden.mean(dim=0)
    expected = whole / whole.norm()

    vector = pool_in_chunks(Pooler(None), of_length(length, pooling), hidden, sorted(c for c in cuts if c < length))

    assert torch.allclose(vector, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_normalising_the_numbers_are_those_of_the_model_in_float32(dtype: torch.dtype) -> None:
    hidden = (100 * states(500)).to(dtype)
    plain_mean = PoolingParams(pooling="mean", normalize=False)
    plain_last = PoolingParams(pooling="last", normalize=False)

    mean = pool_in_chunks(Pooler(None), of_length(500, plain_mean), hidden, [100])
    last = pool_in_chunks(Pooler(None), of_length(500, plain_last), hidden, [100])

    assert torch.allclose(mean, hidden.double().mean(dim=0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(last, hidden[-1].float())


def test_vectors_come_in_the_plans_order_and_others_beside_them_do_not_matter() -> None:
    lengths = [3, 1, 4, 2, 5]
    kinds = [LAST, None, MEAN, PoolingParams(task="classify"), LAST]
    sequences = [of_length(*pair) for pair in zip(lengths, kinds, strict=True)]
    hidden = states(sum(lengths))
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    plan = StepPlan(tuple(chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences))

    results = pool(Pooler(lambda logits: logits.softmax(dim=-1)), plan, hidden, logits)

    vectors = [numbers(result) for result in results]
    ends = [hidden[2], hidden[4:8].mean(dim=0), hidden[14]]
    first, mean, last = (end / end.norm() for end in ends)
    expected = [first, mean, logits[0].softmax(dim=-1), last]
    assert len(vectors) == len(expected)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(vectors, expected, strict=True))


def test_tokens_may_lie_in_another_order_than_the_plans() -> None:
    sequences = [of_length(4, MEAN), of_length(1, LAST), of_length(3, LAST)]
    hidden = states(10)
    plan = StepPlan(tuple(chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences))

    pending = Pooler(None).launch(plan, hidden, NO_LOGITS, first_tokens=[3, 0, 7])  # 1 and 2 pad

    assert pending is not None
    ends = [hidden[3:7].mean(dim=0), hidden[0], hidden[9]]
    for result, end in zip(pending.wait(), ends, strict=True):
        assert torch.allclose(numbers(result), end / end.norm(), atol=1e-6)


def test_a_step_without_vectors_has_nothing_to_wait_for() -> None:
    plan = StepPlan((chunk(of_length(3, None), 0, 3), chunk(of_length(9, MEAN), 0, 5)))

    assert Pooler(None).launch(plan, states(8), NO_LOGITS, first_tokens=[0, 3]) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("pooling", [LAST, MEAN, PoolingParams(normalize=False)])
def test_a_vector_that_is_not_finite_is_an_error_of_its_own(wrong: float, pooling: PoolingParams) -> None:
    bad, good = of_length(3, pooling), of_length(3, pooling)
    hidden = states(6)
    hidden[2, 1] = wrong

    first, second = pool(Pooler(None), StepPlan((chunk(bad, 0, 3), chunk(good, 0, 3))), hidden)

    assert isinstance(first, RowError)
    assert "NaN" in first.message
    assert numbers(second).isfinite().all()


def test_a_vector_of_zeros_stays_one() -> None:
    (result,) = pool(Pooler(None), StepPlan((chunk(of_length(1, LAST), 0, 1),)), torch.zeros(1, WIDTH))

    assert numbers(result).tolist() == [0.0] * WIDTH


def test_a_sequence_that_begins_again_leaves_its_sum_behind() -> None:
    pooler, sequence, hidden = Pooler(None), of_length(9, MEAN), states(9)
    pool(pooler, StepPlan((chunk(sequence, 0, 5),)), torch.full((5, WIDTH), 1e6))  # then preempted

    vector = pool_in_chunks(pooler, sequence, hidden, [4])

    assert torch.allclose(vector, hidden.mean(dim=0) / hidden.mean(dim=0).norm(), atol=1e-6)


@pytest.mark.parametrize("chunks", [[(4, 9)], [(0, 3), (4, 9)], [(0, 3), (4, 6), (6, 9)]])
def test_a_mean_that_lacks_tokens_is_an_error_and_never_a_wrong_vector(chunks: list[tuple[int, int]]) -> None:
    pooler, sequence, hidden = Pooler(None), of_length(9, MEAN), states(9)

    results = []
    for start, end in chunks:
        results += pool(pooler, StepPlan((chunk(sequence, start, end),)), hidden[start:end])

    (result,) = results
    assert isinstance(result, RowError)
    assert "lost some tokens" in result.message


def test_the_sum_of_a_sequence_goes_with_it() -> None:
    pooler, sequence = Pooler(None), of_length(9, MEAN)
    pool(pooler, StepPlan((chunk(sequence, 0, 5),)), states(5))
    assert len(pooler._sums) == 1

    del sequence  # aborted, which the pooler does not hear of
    gc.collect()

    assert len(pooler._sums) == 0


def test_hidden_states_are_asked_for_only_where_they_are_looked_at() -> None:
    pooler = Pooler(None)

    def needs(pooling: PoolingParams | None, end: int) -> bool:
        return pooler.needs_hidden(StepPlan((chunk(of_length(9, pooling), 0, end),)))

    assert [needs(LAST, 5), needs(LAST, 9), needs(MEAN, 5), needs(MEAN, 9)] == [False, True, True, True]
    assert not needs(None, 9)
    assert not needs(PoolingParams(task="classify"), 9)
    assert not pooler._sums
