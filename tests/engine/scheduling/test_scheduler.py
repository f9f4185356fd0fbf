"""Scheduler, call by call: what is planned, who waits, who gives way, and what each row says."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.scheduling.harness import LOGITS_WIDTH, MiniEngine, answer_alone, make_limits
from tests.support.sequences import make_sequence
from trio_llm.config import FakeEngineConfig
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import SequenceState
from trio_llm.engine.scheduling.step import RowError, SampledToken, StepResult
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreOutput, LogprobRow

EOS, OTHER_EOS, STOP = 11, 12, 13


def scripted(*script: int, max_model_len: int = 64) -> MiniEngine:
    """An engine with two end-of-sequence tokens whose every answer is `script`, over and over."""
    limits = make_limits(eos_token_ids=(EOS, OTHER_EOS), max_model_len=max_model_len)
    return MiniEngine(
        limits, FakeEngineConfig(logits_width=LOGITS_WIDTH, script=script, eos_token_ids=limits.eos_token_ids)
    )


def run_scripted(params: SamplingParams, *script: int) -> tuple[list[int], EngineCoreOutput]:
    engine = scripted(*script)
    engine.add(make_sequence("a", [1, 2], params))
    engine.run(max_steps=50)
    return engine.tokens["a"], engine.finals["a"]


def planned(engine: MiniEngine) -> dict[str, tuple[int, int]]:
    """Step once. (start, count) of each request that took part."""
    plan = engine.begin_step()
    assert plan is not None
    chunks = {chunk.sequence.request_id: (chunk.start, chunk.count) for chunk in plan.chunks}
    engine.end_step()
    return chunks


# --------------------------------------------------------------------------------------- when it ends


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_each_of_two_eos_tokens_ends_the_answer(eos: int) -> None:
    tokens, final = run_scripted(SamplingParams(max_tokens=9), 3, eos, 4)

    assert tokens == [3, eos]
    assert (final.finish_reason, final.stop_reason, final.error) == ("stop", None, None)


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_ignore_eos_goes_on_after_each_of_two_eos_tokens(eos: int) -> None:
    tokens, final = run_scripted(SamplingParams(max_tokens=5, ignore_eos=True), 3, eos)

    assert tokens == [3, eos, 3, eos, 3]
    assert final.finish_reason == "length"


@pytest.mark.parametrize("early", [EOS, OTHER_EOS, STOP])
def test_nothing_but_length_ends_the_answer_before_min_tokens(early: int) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(STOP,))

    tokens, final = run_scripted(params, early, early, early, early)

    assert tokens == [early, early, early]
    assert final.finish_reason == "stop"


def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    tokens, final = run_scripted(SamplingParams(max_tokens=9, stop_token_ids=(5, STOP)), 3, STOP)

    assert tokens == [3, STOP]
    assert (final.finish_reason, final.stop_reason) == ("stop", STOP)


def test_ignore_eos_does_not_switch_stop_tokens_off() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(STOP, EOS), ignore_eos=True)

    assert run_scripted(params, OTHER_EOS, STOP)[0] == [OTHER_EOS, STOP]
    tokens, final = run_scripted(params, OTHER_EOS, EOS)
    assert tokens == [OTHER_EOS, EOS]
    assert final.stop_reason == EOS


def test_a_stop_as_the_last_token_allowed_is_a_stop() -> None:
    tokens, final = run_scripted(SamplingParams(max_tokens=2), 3, EOS)

    assert tokens == [3, EOS]
    assert final.finish_reason == "stop"


def test_max_tokens_ends_the_answer() -> None:
    tokens, final = run_scripted(SamplingParams(max_tokens=3), 3)

    assert tokens == [3, 3, 3]
    assert (final.finish_reason, final.stop_reason) == ("length", None)


def test_the_models_length_ends_the_answer() -> None:
    engine = scripted(3, max_model_len=10)
    engine.add(make_sequence("a", [1] * 6, max_tokens=100))

    engine.run(max_steps=50)

    assert engine.tokens["a"] == [3] * 4
    assert engine.finals["a"].finish_reason == "length"


@pytest.mark.parametrize("token_id", [-1, LOGITS_WIDTH, 2**63])
def test_a_token_that_no_model_can_know_ends_its_own_request_and_no_other(token_id: int) -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence("bad", [1]))
    scheduler.add(make_sequence("good", [2]))
    plan = scheduler.schedule()
    assert plan is not None

    bad, good = scheduler.commit(plan, StepResult((SampledToken(token_id), SampledToken(3))))

    assert (bad.request_id, bad.new_token_ids, bad.finish_reason) == ("bad", [], "error")
    assert f"token {token_id}" in (bad.error or "")
    assert (good.request_id, good.new_token_ids, good.finish_reason) == ("good", [3], None)
    scheduler.check()


# -------------------------------------------------------------------------------------- what rows hold


def test_logprobs_come_with_the_tokens_they_belong_to() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence("a", [1]))
    plan = scheduler.schedule()
    assert plan is not None
    logprobs = LogprobRow(token_ids=[4, 4], logprobs=[-0.1, -0.1], sampled_rank=1)

    assert scheduler.commit(plan, StepResult((SampledToken(4, logprobs),))) == [
        EngineCoreOutput(request_id="a", start=0, new_token_ids=[4], logprobs=[logprobs], queued_s=0.0, scheduled_s=0.0)
    ]


def test_a_failed_row_ends_its_own_request_and_no_other() -> None:
    engine = MiniEngine(fake=FakeEngineConfig(logits_width=LOGITS_WIDTH, failing_row_prompt=7))
    engine.add(make_sequence("bad", [7, 1]))
    engine.add(make_sequence("good", [8, 1]))

    engine.run(max_steps=50)

    assert engine.finals["bad"].finish_reason == "error"
    assert "fails rows" in (engine.finals["bad"].error or "")
    assert engine.tokens["bad"] == []
    assert engine.finals["good"].finish_reason == "length"
    assert engine.tokens["good"] == answer_alone([8, 1], SamplingParams(max_tokens=8))


def test_a_failed_row_after_some_tokens_starts_where_they_end() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence("a", [1], generated=[2, 3]))
    plan = scheduler.schedule()
    assert plan is not None

    assert scheduler.commit(plan, StepResult((RowError("bad logits"),))) == [
        EngineCoreOutput("a", start=2, new_token_ids=[], finish_reason="error", error="bad logits")
    ]


@pytest.mark.parametrize("num_generated", [1, 5, 7])
def test_a_recovered_request_goes_on_where_it_was_with_the_same_tokens(num_generated: int) -> None:
    params = SamplingParams(max_tokens=8)
    whole = answer_alone([4, 2], params)
    engine = MiniEngine()
    engine.add(make_sequence("a", [4, 2], params, generated=whole[:num_generated]))

    rows = engine.step()
    engine.run(max_steps=50)

    assert [row.start for row in rows] == [num_generated]
    assert engine.tokens["a"] == whole


# ------------------------------------------------------------------------------------------- aborts


def test_aborting_an_unknown_request_is_confirmed_and_touches_no_other() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("a", [1]))

    row = engine.abort("unknown")

    assert row == EngineCoreOutput(request_id="unknown", start=0, new_token_ids=[], finish_reason="abort")
    engine.run(max_steps=50)
    assert engine.finals["a"].finish_reason == "length"


def test_aborting_twice_and_after_the_end_is_confirmed_each_time() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("a", [1], max_tokens=1))
    engine.run(max_steps=5)

    assert [engine.abort("a").finish_reason for _ in range(2)] == ["abort", "abort"]


def test_an_aborted_waiting_request_never_costs_a_token() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    engine.add(make_sequence("first", [1]))
    engine.step()
    engine.add(make_sequence("second", [2]))

    row = engine.abort("second")
    engine.run(max_steps=50)

    assert (row.start, row.finish_reason) == (0, "abort")
    assert (engine.num_starts("first"), engine.num_starts("second")) == (1, 0)


def test_an_aborted_running_request_frees_its_blocks_and_says_how_far_it_was() -> None:
    engine = MiniEngine()
    sequence = engine.add(make_sequence("a", [1] * 6))
    engine.step()
    engine.step()

    row = engine.abort("a")

    assert (row.start, row.new_token_ids, row.finish_reason) == (2, [], "abort")
    assert sequence.state is SequenceState.FINISHED
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.stats().num_free_blocks == engine.limits.num_blocks


def test_an_abort_in_the_middle_of_a_prefill_stops_it_at_the_chunk() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8))
    engine.add(make_sequence("a", [1] * 40))
    assert planned(engine) == {"a": (0, 8)}

    engine.abort("a")

    assert engine.scheduler.schedule() is None


def test_what_a_step_in_flight_samples_for_an_aborted_request_is_dropped() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("a", [1]))
    engine.add(make_sequence("b", [2]))
    assert engine.begin_step()

    row = engine.abort("a")
    rows = engine.end_step()

    assert row.finish_reason == "abort"
    assert [row.request_id for row in rows] == ["b"]
    engine.run(max_steps=50)
    assert engine.tokens["b"] == answer_alone([2], SamplingParams(max_tokens=8))


def test_blocks_freed_while_a_step_is_in_flight_are_not_given_away_before_its_commit() -> None:
    engine = MiniEngine(make_limits(num_blocks=1, max_model_len=4))
    engine.add(make_sequence("a", [1, 2]))
    assert engine.begin_step()
    engine.abort("a")
    engine.add(make_sequence("b", [3, 4]))

    assert engine.begin_step() is None

    engine.end_step()
    assert planned(engine) == {"b": (0, 2)}


def test_an_id_may_be_used_again_after_its_abort() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("a", [1]))
    assert engine.begin_step()
    engine.abort("a")
    engine.add(make_sequence("a", [2], max_tokens=3))

    assert engine.end_step() == []

    engine.run(max_steps=50)
    assert engine.tokens["a"] == answer_alone([2], SamplingParams(max_tokens=3))


def test_a_plan_is_committed_once() -> None:
    engine = MiniEngine()
    engine.add(make_sequence("a", [1]))
    plan = engine.begin_step()
    assert plan is not None
    launched = engine.in_flight[0][1]
    engine.end_step()

    with pytest.raises(AssertionError, match="no plan is in flight"):
        engine.scheduler.commit(plan, launched.wait())


# ----------------------------------------------------------------------------------------- deadlines


def test_a_request_that_waits_past_its_deadline_ends_with_an_error() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    engine.add(make_sequence("first", [1]))
    engine.step()
    engine.add(make_sequence("late", [2], expires_at=5.0))
    engine.add(make_sequence("patient", [3], expires_at=6.0))

    assert engine.scheduler.take_expired(4.9) == []
    rows = engine.scheduler.take_expired(5.0)
    engine.scheduler.check()

    assert [(row.request_id, row.start, row.finish_reason) for row in rows] == [("late", 0, "error")]
    assert "deadline" in (rows[0].error or "")
    assert engine.scheduler.take_expired(5.0) == []
    engine.run(max_steps=50)
    assert engine.finals.keys() == {"first", "patient"}


def test_a_request_that_has_begun_is_not_dropped_at_its_deadline() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    engine.add(make_sequence("running", [1], expires_at=1.0))
    engine.step()
    engine.add(make_sequence("recovered", [2], generated=[3], expires_at=1.0))

    assert engine.scheduler.take_expired(9.0) == []


@pytest.mark.parametrize("budget", [2, 32])
def test_a_preempted_request_is_not_dropped_at_its_deadline_also_without_a_token_yet(budget: int) -> None:
    engine = MiniEngine(make_limits(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=budget, max_model_len=16))
    engine.add(make_sequence("first", [1] * 3, max_tokens=9))
    second = engine.add(make_sequence("second", [2] * 8, expires_at=1.0))
    while second.num_preemptions == 0:
        engine.step()
    assert second.state is SequenceState.WAITING
    assert bool(engine.tokens["second"]) == (budget == 32)

    assert engine.scheduler.take_expired(9.0) == []

    engine.run(max_steps=100)
    assert engine.finals["second"].finish_reason == "length"


# -------------------------------------------------------------------------- who gets tokens and blocks


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8))
    engine.add(make_sequence("a", [1] * 20, max_tokens=2))

    assert [planned(engine) for _ in range(4)] == [{"a": (0, 8)}, {"a": (8, 8)}, {"a": (16, 4)}, {"a": (20, 1)}]
    assert not engine.scheduler.has_unfinished


def test_decoding_goes_on_beside_a_long_prefill_and_the_rest_of_the_budget_is_used() -> None:
    engine = MiniEngine(make_limits(max_num_batched_tokens=8))
    engine.add(make_sequence("a", [1, 2], max_tokens=9))
    planned(engine)
    engine.add(make_sequence("b", [3] * 10))
    engine.add(make_sequence("c", [4] * 10))

    assert planned(engine) == {"a": (2, 1), "b": (0, 7)}
    assert planned(engine) == {"a": (3, 1), "b": (7, 3), "c": (0, 4)}
    assert planned(engine) == {"a": (4, 1), "b": (10, 1), "c": (4, 6)}


def test_equals_are_served_in_the_order_of_arrival() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    for name in ("first", "second", "third"):
        engine.add(make_sequence(name, [1]))

    engine.run(max_steps=100)

    assert list(engine.finals) == ["first", "second", "third"]


def test_a_smaller_priority_is_served_first() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    for name, priority in (("low", 5), ("normal", 0), ("high", -5)):
        engine.add(make_sequence(name, [1], priority=priority))

    engine.run(max_steps=100)

    assert list(engine.finals) == ["high", "normal", "low"]


def test_no_small_prompt_overtakes_a_big_one_that_waits_for_blocks() -> None:
    engine = MiniEngine(make_limits(num_blocks=8, max_model_len=32))
    engine.add(make_sequence("running", [1] * 8, max_tokens=20))
    engine.step()
    engine.add(make_sequence("big", [2] * 28, max_tokens=1))
    engine.add(make_sequence("small", [3], max_tokens=1))

    engine.run(max_steps=100)

    assert list(engine.finals) == ["running", "big", "small"]


def test_a_prompt_that_needs_the_whole_cache_is_served() -> None:
    engine = MiniEngine(make_limits(num_blocks=4, max_model_len=16))
    engine.add(make_sequence("a", [1] * 15, max_tokens=9))

    engine.run(max_steps=5)

    assert engine.finals["a"].finish_reason == "length"


def test_admission_leaves_a_spare_block_to_those_who_run() -> None:
    engine = MiniEngine(make_limits(num_blocks=4, max_model_len=16))
    engine.add(make_sequence("running", [1] * 4))
    engine.step()
    engine.add(make_sequence("would take the last", [2] * 8))

    assert planned(engine).keys() == {"running"}
    assert engine.scheduler.stats().num_free_blocks == 2


def test_the_newest_of_the_lowest_priority_gives_way_when_blocks_are_short() -> None:
    engine = MiniEngine(make_limits(num_blocks=5, max_model_len=20))
    lowest = engine.add(make_sequence("lowest", [1] * 3, max_tokens=12, priority=1))
    older = engine.add(make_sequence("older", [2] * 3, max_tokens=12))
    newer = engine.add(make_sequence("newer", [3] * 3, max_tokens=12))

    preempted = []
    while engine.scheduler.has_unfinished:
        before = [s.num_preemptions for s in (lowest, older, newer)]
        engine.step()
        after = [s.num_preemptions for s in (lowest, older, newer)]
        preempted += [s for s, b, a in zip((lowest, older, newer), before, after, strict=True) if a > b]

    assert preempted[:2] == [lowest, newer]
    assert older.num_preemptions == 0
    assert engine.scheduler.stats().num_preempted == len(preempted)
    for number, sequence in ((1, lowest), (2, older), (3, newer)):
        assert engine.tokens[sequence.request_id] == answer_alone([number] * 3, SamplingParams(max_tokens=12))


def test_a_preempted_request_comes_back_only_when_all_its_tokens_fit() -> None:
    engine = MiniEngine(make_limits(num_blocks=6, max_model_len=24))
    engine.add(make_sequence("first", [1] * 8, max_tokens=16))
    second = engine.add(make_sequence("second", [2] * 8, max_tokens=16))

    engine.run(max_steps=100)

    assert second.num_preemptions == 1
    assert (engine.num_starts("first"), engine.num_starts("second")) == (1, 2)


def test_statistics_count_what_runs_waits_and_is_free() -> None:
    engine = MiniEngine(make_limits(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=32))
    engine.add(make_sequence("a", [1] * 6, generated=[1]))
    engine.add(make_sequence("b", [2]))

    num_prompt_tokens = []
    for _ in range(3):
        engine.step()
        num_prompt_tokens.append(engine.scheduler.stats().num_prompt_tokens)

    assert num_prompt_tokens == [4, 2, 0]
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.num_blocks) == (1, 1, 6, 8)
    assert engine.scheduler.stats().num_running == 1


# --------------------------------------------------------------------------------- what is refused


def test_a_model_length_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(AssertionError):
        make_limits(num_blocks=4, max_model_len=17)


def test_a_budget_below_one_token_a_sequence_is_refused() -> None:
    with pytest.raises(AssertionError):
        make_limits(max_num_seqs=9, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "params"),
    [(0, SamplingParams(max_tokens=1)), (64, SamplingParams(max_tokens=1)), (1, SamplingParams())],
)
def test_a_sequence_that_could_never_work_is_refused(num_prompt_tokens: int, params: SamplingParams) -> None:
    scheduler = Scheduler(make_limits(max_model_len=64))

    with pytest.raises(AssertionError):
        scheduler.add(make_sequence("a", [1] * num_prompt_tokens, params))

    assert not scheduler.has_unfinished


def test_an_id_that_is_in_use_is_refused() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence("a", [1]))

    with pytest.raises(AssertionError, match="already"):
        scheduler.add(make_sequence("a", [2]))


@pytest.mark.parametrize("num_results", [0, 2])
def test_a_result_with_the_wrong_number_of_rows_is_refused(num_results: int) -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence("a", [1]))
    plan = scheduler.schedule()
    assert plan is not None

    with pytest.raises(AssertionError, match="not one result"):
        scheduler.commit(plan, StepResult((SampledToken(1),) * num_results))


def test_limits_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_limits().num_blocks = 3  # type: ignore[misc]
