"""Pooling among random traffic: whatever comes and goes, a vector is that of its prompt alone, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.engine.scheduling.harness import MiniEngine, make_limits
from tests.engine.scheduling.test_scheduler_properties import Traffic, prompts
from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.pooling import PoolingKind, PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING

KINDS = st.sampled_from(["last", "mean"])


def make_pooling(
    request_id: str,
    prompt: list[int],
    kind: PoolingKind = "last",
    *,
    priority: int = 0,
    expires_at: float | None = None,
) -> Sequence:
    sequence = make_sequence(request_id, prompt, NO_SAMPLING, priority=priority, expires_at=expires_at)
    sequence.pooling = PoolingParams(pooling=kind)
    return sequence


def vector_of(engine: MiniEngine, request_id: str) -> bytes:
    row = engine.finals[request_id]
    assert (row.finish_reason, row.new_token_ids, row.start) == ("stop", [], 0)
    assert row.pooled is not None
    return row.pooled


def vector_alone(prompt: list[int], kind: PoolingKind) -> bytes:
    engine = MiniEngine(make_limits(num_blocks=256, max_num_batched_tokens=1024, max_model_len=1024))
    engine.add(make_pooling("alone", prompt, kind))
    engine.step()
    return vector_of(engine, "alone")


class MixedTraffic(Traffic):
    """Requests for vectors come between those for answers."""

    @rule(prompt=prompts, kind=KINDS, priority=st.integers(0, 2), patience_s=st.none() | st.integers(0, 3))
    def add_pooling(self, prompt: list[int], kind: PoolingKind, priority: int, patience_s: int | None) -> None:
        sequence = make_pooling(
            f"r{len(self.sequences)}",
            prompt[: self.engine.limits.max_model_len],
            kind,
            priority=priority,
            expires_at=None if patience_s is None else self.now_s + patience_s,
        )
        self.sequences[sequence.request_id] = self.engine.add(sequence)

    def answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return [] if params is NO_SAMPLING else super().answer(prompt, params)

    def check_that_nothing_is_computed_twice(self, sequence: Sequence) -> None:
        if sequence.pooling is None:
            super().check_that_nothing_is_computed_twice(sequence)
            return
        counts = [self.engine.num_computed[sequence.request_id, i] for i in range(len(sequence.token_ids))]
        assert max(counts) <= 1 + sequence.num_preemptions
        if sequence.request_id not in self.gone:
            assert counts[-1] >= 1
            # What a mean did not compute it could not add.
            assert min(counts) >= 1 or (self.engine.limits.keeps_cache and not sequence.pooling.is_mean)

    def teardown(self) -> None:
        super().teardown()
        for sequence in self.sequences.values():
            if sequence.pooling is not None and sequence.request_id not in self.gone:
                kind: PoolingKind = "mean" if sequence.pooling.is_mean else "last"
                assert vector_of(self.engine, sequence.request_id) == vector_alone(sequence.token_ids, kind)


MixedTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMixedTraffic = MixedTraffic.TestCase


@settings(max_examples=40, deadline=None)
@given(requests=st.lists(st.tuples(prompts, KINDS), min_size=1, max_size=6), run_ahead=st.integers(0, 1))
def test_neither_cache_size_nor_chunks_nor_batch_change_a_vector(
    requests: list[tuple[list[int], PoolingKind]], run_ahead: int
) -> None:
    expected = [vector_alone(prompt, kind) for prompt, kind in requests]

    for limits in (
        make_limits(num_blocks=9, max_model_len=36, max_num_seqs=3, max_num_batched_tokens=3),
        make_limits(num_blocks=256, max_num_batched_tokens=1024),
    ):
        engine = MiniEngine(limits, run_ahead=run_ahead)
        for i, (prompt, kind) in enumerate(requests):
            engine.add(make_pooling(str(i), prompt, kind))
        engine.run(max_steps=1000)
        assert [vector_of(engine, str(i)) for i in range(len(requests))] == expected


def test_other_prompts_and_other_ways_of_pooling_give_other_vectors() -> None:
    vectors = {vector_alone(prompt, kind) for prompt in ([1], [2], [1, 2]) for kind in ("last", "mean")}

    assert len(vectors) == 6


def test_the_blocks_of_a_pooled_sequence_are_free_when_its_vector_is_there() -> None:
    engine = MiniEngine()
    sequence = engine.add(make_pooling("a", [1] * 20))

    (row,) = engine.step()

    assert row.pooled is not None
    assert sequence.block_ids == []
    assert engine.scheduler.stats().num_free_blocks == engine.limits.num_blocks
    assert not engine.scheduler.has_unfinished


def test_a_pooling_sequence_may_fill_the_context_and_no_more() -> None:
    limits: SchedulerLimits = make_limits(max_model_len=12)
    engine = MiniEngine(limits)
    engine.add(make_pooling("whole", [1] * 12))
    engine.run(max_steps=3)

    assert vector_of(engine, "whole")
    with pytest.raises(AssertionError):
        engine.add(make_pooling("longer", [1] * 13))


def test_a_vector_that_was_computed_while_its_request_was_aborted_is_dropped() -> None:
    engine = MiniEngine()
    engine.add(make_pooling("a", [1, 2]))
    assert engine.begin_step() is not None

    assert engine.abort("a").finish_reason == "abort"

    assert engine.end_step() == []


PROMPT = [1, 2, 3, 0] * 5


def num_computed(engine: MiniEngine, request_id: str) -> list[int]:
    return [engine.num_computed[request_id, position] for position in range(len(PROMPT))]


def test_the_last_token_is_pooled_without_computing_what_the_cache_has() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("answer", PROMPT, max_tokens=2))
    engine.run(max_steps=5)
    engine.add(make_pooling("a", PROMPT))
    engine.run(max_steps=5)

    assert vector_of(engine, "a") == vector_alone(PROMPT, "last")
    assert engine.finals["a"].num_cached_tokens == 16
    assert num_computed(engine, "a") == [0] * 16 + [1] * 4


def test_a_mean_computes_every_token_whatever_the_cache_has_and_leaves_it_for_others() -> None:
    engine = MiniEngine()
    for name in ("first", "second"):
        engine.add(make_pooling(name, PROMPT, "mean"))
        engine.run(max_steps=5)
        assert vector_of(engine, name) == vector_alone(PROMPT, "mean")
        assert engine.finals[name].num_cached_tokens == 0
        assert num_computed(engine, name) == [1] * 20
    engine.add(make_pooling("last", PROMPT))
    engine.run(max_steps=5)

    assert engine.finals["last"].num_cached_tokens == 16


def test_with_a_step_launched_ahead_a_pooling_sequence_is_in_no_step_after_its_last_token() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8), run_ahead=1)
    engine.add(make_pooling("a", PROMPT))
    engine.add(make_sequence("answer", [3, 3], max_tokens=6))
    engine.run(max_steps=30)

    assert num_computed(engine, "a") == [1] * 20
    assert engine.num_computed["a", 20] == 0
    assert engine.finals["answer"].finish_reason == "length"
