"""EngineCore: messages in, one message a step out, whatever the messages are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.one_client import step, take_answers
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.fake import load_fake
from trio_llm.engine.scheduling.step import StepPlan, StepResult
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import (
    NO_SAMPLING,
    Abort,
    Ack,
    AllBlocksCleared,
    Continue,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
)


def a_core(
    *,
    credit_steps: int = 1000,
    run_ahead: int | None = None,
    kv_events: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
    **fake: Any,
) -> EngineCore:
    config = EngineConfig(
        fake=FakeEngineConfig(model_dir="/m", **fake),
        num_gpu_blocks_override=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        credit_steps=credit_steps,
        run_ahead=run_ahead,
        kv_events=kv_events,
    )
    return EngineCore(load_fake(config, lambda *_: None, model_dir="/m"), config, epoch=3, clock=clock)


def a_request(request_id: str = "r", prompt: list[int] | None = None, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 3), seed=1)
    return EngineCoreRequest(request_id, [1, 2] if prompt is None else prompt, params, **fields)


def a_pooling_request(
    request_id: str = "r", prompt: list[int] | None = None, params: PoolingParams | None = None, **fields: Any
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        [1, 2] if prompt is None else prompt,
        NO_SAMPLING,
        pooling_params=params or PoolingParams(),
        **fields,
    )


def turn(core: EngineCore) -> list[EngineCoreOutputs]:
    """What the loop sends in one turn."""
    answers = take_answers(core)
    outputs = step(core)
    return answers if outputs is None else [*answers, outputs]


def run(core: EngineCore, *messages: Any) -> list[EngineCoreOutput]:
    """Handle the messages, then step until nothing is left to do."""
    for message in messages:
        core.handle(message)
    rows: list[EngineCoreOutput] = []
    for _ in range(1000):
        if not core.is_busy:
            return rows
        rows += [row for outputs in turn(core) for row in outputs.outputs]
    raise AssertionError("the engine is never done")


def test_a_request_gets_its_rows_in_order_and_one_end() -> None:
    rows = run(a_core(), a_request())

    assert [row.start for row in rows] == [0, 1, 2]
    assert [row.finish_reason for row in rows] == [None, None, "length"]


def test_running_ahead_launches_a_step_before_it_reads_the_one_before_and_changes_no_row() -> None:
    requests = [a_request(f"r{i}", [i + 1] * 9, max_tokens=5 + i) for i in range(5)]
    events: list[str] = []
    ahead = a_core(run_ahead=1)
    executor = ahead._executor
    launch = executor.launch

    class Noted:
        def __init__(self, plan: StepPlan) -> None:
            events.append("launch")
            self.launched = launch(plan)

        def wait(self) -> StepResult:
            events.append("wait")
            return self.launched.wait()

    executor.launch = Noted  # type: ignore[method-assign]

    def by_request(rows: list[EngineCoreOutput]) -> dict[str, list[tuple[int, list[int]]]]:
        found: dict[str, list[tuple[int, list[int]]]] = {}
        for row in rows:
            found.setdefault(row.request_id, []).append((row.start, row.new_token_ids))
        return found

    assert by_request(run(ahead, *requests)) == by_request(run(a_core(run_ahead=0), *requests))
    assert events[:5] == ["launch", "launch", "wait", "launch", "wait"]
    assert events.count("launch") == events.count("wait")


def test_an_abort_while_two_steps_are_in_flight_frees_everything() -> None:
    core = a_core(run_ahead=1)
    core.handle(a_request(prompt=[1] * 40, max_tokens=50))
    for _ in range(6):
        step(core)

    rows = run(core, Abort(["r"]))

    assert [row.finish_reason for row in rows] == ["abort"]
    assert core.stats.num_free_blocks == core.stats.num_blocks


def test_requests_with_another_salt_share_nothing() -> None:
    core = a_core()
    cached = []
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        rows = run(core, a_request(name, [1] * 40, cache_salt=salt))
        cached.append(rows[0].num_cached_tokens)

    assert cached == [0, 0, 32]


def test_kv_events_go_out_with_the_step_that_makes_them_also_when_it_has_no_rows() -> None:
    sent: dict[bool, list[tuple[int, int]]] = {}
    for kv_events in (False, True):
        core = a_core(kv_events=kv_events)
        core.handle(a_request(prompt=[1] * 70, max_tokens=1))
        outputs = [step(core) for _ in range(5)]
        # 16 tokens a step; the blocks have 32.
        sent[kv_events] = [(i, len(o.kv_events)) for i, o in enumerate(outputs) if o is not None]
        assert not core.is_busy

    assert sent == {False: [(4, 0)], True: [(1, 1), (3, 1), (4, 0)]}


def a_core_without_credit() -> EngineCore:
    core = a_core(kv_events=True, credit_steps=1)
    run(core, a_request(prompt=[1] * 16, max_tokens=1))
    assert not core.has_credit
    return core


def test_kv_events_wait_for_credit() -> None:
    core = a_core_without_credit()
    core._scheduler.reset_prefix_cache()

    assert not core.is_busy
    assert turn(core) == []
    core.handle(Ack(1))
    assert core.is_busy
    (outputs,) = turn(core)

    assert outputs.kv_events == [AllBlocksCleared()]
    assert not core.is_busy


def test_kv_events_that_wait_go_out_with_an_answer_which_needs_no_credit() -> None:
    core = a_core_without_credit()
    core.handle(UtilityCall(1, "reset_prefix_cache"))

    (outputs,) = turn(core)

    assert [result.call_id for result in outputs.utility_results] == [1]
    assert outputs.kv_events == [AllBlocksCleared()]
    assert not core.is_busy


def test_messages_carry_the_epoch_and_a_count() -> None:
    core = a_core()
    core.handle(a_request())

    sent = [step(core) for _ in range(3)]

    assert [(o.epoch, o.step) for o in sent if o] == [(3, 1), (3, 2), (3, 3)]


def test_a_request_that_goes_on_after_given_tokens_gives_the_ones_that_were_missing() -> None:
    undisturbed = [t for row in run(a_core(), a_request(max_tokens=6)) for t in row.new_token_ids]

    rows = run(a_core(), a_request(max_tokens=6, output_token_ids=undisturbed[:4]))

    assert rows[0].start == 4
    assert [t for row in rows for t in row.new_token_ids] == undisturbed[4:]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (a_request(prompt=[]), "no tokens"),
        (a_request(prompt=[1] * 512), "no room"),
        (a_request(prompt=[-1]), "outside"),
        (a_request(prompt=[256]), "outside"),
        (a_request(output_token_ids=[2**40]), "outside"),
        (a_request(output_token_ids=[1, 2, 3]), "already"),
        (EngineCoreRequest("r", [1], SamplingParams()), "must be set"),
    ],
)
def test_a_request_that_the_front_end_should_have_refused_is_an_error_row(
    request_: EngineCoreRequest, words: str
) -> None:
    core = a_core()

    (row,) = run(core, request_)

    assert row.finish_reason == "error"
    assert words in (row.error or "")
    assert len(run(core, a_request())) == 3


def test_an_id_that_is_in_use_is_refused_and_its_first_user_goes_on() -> None:
    rows = run(a_core(), a_request(), a_request())

    assert sorted(str(row.finish_reason) for row in rows if row.finish_reason) == ["error", "length"]


def test_every_abort_is_confirmed_also_that_of_an_unknown_id() -> None:
    rows = run(a_core(), a_request(), Abort(["r", "unknown"]))

    assert [(row.request_id, row.finish_reason) for row in rows] == [("r", "abort"), ("unknown", "abort")]


def test_without_credit_no_token_is_computed_and_confirmations_still_go_out() -> None:
    core = a_core(credit_steps=2)
    core.handle(a_request(max_tokens=10))
    assert step(core)
    assert step(core)

    assert not core.is_busy
    assert step(core) is None
    core.handle(Abort(["unknown"]))
    (answer,) = turn(core)
    assert [row.request_id for row in answer.outputs] == ["unknown"]
    core.handle(Ack(3))
    assert core.is_busy
    rows = step(core)
    assert isinstance(rows, EngineCoreOutputs)
    assert rows.outputs[0].start == 2


def test_an_ack_of_messages_that_were_never_sent_gives_no_credit() -> None:
    core = a_core(credit_steps=2)
    core.handle(Ack(2**60))
    core.handle(a_request(max_tokens=10))

    assert step(core)
    assert step(core)
    assert step(core) is None


@pytest.mark.parametrize("call", [UtilityCall(7, "no_such_method"), UtilityCall(7, "ping", [1, 2, 3])])
def test_a_call_that_fails_is_answered_and_the_engine_goes_on(call: UtilityCall) -> None:
    core = a_core()
    core.handle(call)

    (outputs,) = take_answers(core)

    (result,) = outputs.utility_results
    assert (result.call_id, result.error is None) == (7, False)
    assert len(run(core, a_request())) == 3


def test_a_deadline_counts_from_arrival_and_drops_what_still_waits() -> None:
    now_s = 100.0
    core = a_core(clock=lambda: now_s)
    core.handle(a_request("late", deadline_s=5.0))
    core.handle(a_request("in time", deadline_s=50.0))
    now_s = 106.0

    (outputs,) = take_answers(core)

    errors = [row.request_id for row in outputs.outputs if row.finish_reason == "error"]
    assert errors == ["late"]
    assert [row.request_id for row in outputs.outputs if row.is_expired] == ["late"]


MESSAGES = st.one_of(
    st.builds(
        a_request,
        st.sampled_from("abc"),
        st.lists(st.integers(-1, 300), max_size=40),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-2, 2),
        output_token_ids=st.lists(st.integers(0, 256), max_size=3),
    ),
    st.builds(
        a_pooling_request,
        st.sampled_from("abc"),
        st.lists(st.integers(0, 300), max_size=40),
        st.builds(PoolingParams, pooling=st.sampled_from([None, "last", "mean"]))
        | st.just(PoolingParams(task="classify")),
    ),
    st.builds(Abort, st.lists(st.sampled_from("abcd"), max_size=3)),
    st.builds(Ack, st.integers(-5, 50)),
    st.builds(UtilityCall, st.integers(0, 5), st.sampled_from(["ping", "check_scheduler", "x"]), st.just([])),
)


@given(st.lists(st.one_of(MESSAGES, st.none()), max_size=40))
def test_no_mix_of_messages_ends_the_engine_or_leaks_a_block(messages: list[Any]) -> None:
    core = a_core(credit_steps=10**9)

    for message in messages:  # None stands for a turn of the loop
        if message is None:
            turn(core)
        else:
            core.handle(message)
    run(core, Abort(["a", "b", "c"]))

    core.handle(UtilityCall(99, "check_scheduler"))
    (outputs,) = take_answers(core)
    assert outputs.utility_results[-1].value == {
        "num_running": 0,
        "num_waiting": 0,
        "num_free_blocks": 16,
        "num_blocks": 16,
    }


# ------------------------------------------------------------------------------------------ sessions

PARAMS = SamplingParams(max_tokens=3, seed=1)


def test_the_rows_of_a_session_count_the_tokens_of_all_its_answers() -> None:
    core = a_core()

    first = run(core, a_request(resumable=True))
    second = run(core, Continue("r", [5], PARAMS))
    end = run(core, Abort(["r"]))

    assert [row.start for row in first + second + end] == [0, 1, 2, 3, 4, 5, 6]
    assert [row.finish_reason for row in first + second + end] == [None, None, "length"] * 2 + ["abort"]
    assert [row.goes_on for row in first + second + end] == [False, False, True] * 2 + [False]
    assert core.stats.num_free_blocks == core.stats.num_blocks


def test_a_session_between_inputs_leaves_the_engine_idle() -> None:
    core = a_core()

    run(core, a_request(resumable=True))

    assert not core.is_busy
    assert core.stats.num_running == core.stats.num_waiting == 0
    assert core.stats.num_free_blocks < core.stats.num_blocks


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Continue("r", [], PARAMS), "no tokens"),
        (Continue("r", [-1], PARAMS), "outside"),
        (Continue("r", [2**40], PARAMS), "outside"),
        (Continue("r", [1] * 10_000, PARAMS), "no room"),
        (Continue("r", [1], SamplingParams(seed=1, max_tokens=None)), "must be set"),
        (Continue("r", [1], SamplingParams(seed=1, max_tokens=1, prompt_logprobs=1)), "prompt_logprobs"),
        (Continue("r", [1], PARAMS, [[]]), "a word"),
    ],
)
def test_an_input_that_the_front_end_should_have_refused_ends_its_session_alone(message: Continue, why: str) -> None:
    core = a_core()
    run(core, a_request(resumable=True))

    (row,) = run(core, message)

    assert (row.finish_reason, row.start, row.goes_on) == ("error", 3, False)
    assert row.error is not None
    assert why in row.error
    assert core.stats.num_free_blocks == core.stats.num_blocks
    assert len(run(core, a_request("next"))) == 3


def test_an_input_before_the_answer_is_over_ends_its_session_alone() -> None:
    core = a_core()
    core.handle(a_request(resumable=True))
    step(core)

    (row,) = run(core, Continue("r", [1], PARAMS))

    assert row.error is not None
    assert "before the answer" in row.error
    assert core.stats.num_free_blocks == core.stats.num_blocks


def test_an_input_for_no_session_is_nothing() -> None:
    assert run(a_core(), Continue("unknown", [1], PARAMS)) == []


# ------------------------------------------------------------------------------------------- pooling


def test_a_pooling_request_gets_one_row_with_its_vector_and_leaves_nothing() -> None:
    core = a_core(embedding_size=5)

    (row,) = run(core, a_pooling_request(prompt=list(range(50))))  # four steps of 16 tokens

    assert (row.start, row.new_token_ids, row.finish_reason) == (0, [], "stop")
    assert row.pooled is not None
    assert len(row.pooled) == 5 * 4
    assert core.stats.num_free_blocks == core.stats.num_blocks


def test_a_prompt_without_an_answer_may_fill_the_context_and_no_more() -> None:
    core = a_core()

    (whole,) = run(core, a_pooling_request(prompt=[1] * 512))
    (longer,) = run(core, a_pooling_request(prompt=[1] * 513))

    assert whole.pooled
    assert (longer.finish_reason, longer.pooled) == ("error", None)


@pytest.mark.parametrize(
    ("fake", "request_", "words"),
    [
        ({}, a_pooling_request(params=PoolingParams(task="classify")), "cannot classify"),
        ({"num_labels": 3}, a_request(), "cannot generate"),
        ({"num_labels": 3}, a_request(resumable=True), "cannot generate"),
        ({}, a_pooling_request(resumable=True), "inputs that follow"),
        ({}, a_pooling_request(output_token_ids=[1]), "tokens that were generated"),
        ({}, a_pooling_request(prompt=[]), "no tokens"),
        ({}, a_pooling_request(prompt=[256]), "outside"),
    ],
)
def test_what_the_model_cannot_do_is_an_error_row_and_the_engine_goes_on(
    fake: dict[str, Any], request_: EngineCoreRequest, words: str
) -> None:
    core = a_core(**fake)

    (row,) = run(core, request_)

    assert row.finish_reason == "error"
    assert words in (row.error or "")
    assert [one.finish_reason for one in run(core, a_pooling_request())] == ["stop"]


def test_a_row_that_fails_ends_its_pooling_request_alone() -> None:
    rows = run(a_core(failing_row_prompt=9), a_pooling_request("bad", [9, 1]), a_pooling_request("good"), a_request())

    assert {row.request_id: row.finish_reason for row in rows} == {"bad": "error", "good": "stop", "r": "length"}
    assert [row.request_id for row in rows if row.pooled] == ["good"]


# ------------------------------------------------------------------------------------- statistics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_row_with_the_first_token_tells_how_long_a_request_waited_for_its_turn() -> None:
    clock = Clock()
    core = a_core(clock=clock)
    rows: list[EngineCoreOutput] = []
    for index in range(5):  # four run at a time
        core.handle(a_request(str(index)))
    while core.is_busy:
        clock.now_s += 1.5
        rows += [row for message in turn(core) for row in message.outputs]

    told = {(row.request_id, row.start): (row.queued_s, row.scheduled_s) for row in rows}
    assert [told["0", start] for start in range(3)] == [(1.5, 101.5), (None, None), (None, None)]
    assert [told["4", start] for start in range(3)] == [(6.0, 106.0), (None, None), (None, None)]


def test_a_vector_comes_with_the_time_that_its_request_waited() -> None:
    clock = Clock()
    core = a_core(clock=clock)
    core.handle(a_pooling_request())
    clock.now_s += 2

    (row,) = run(core)

    assert (row.queued_s, row.scheduled_s) == (2.0, 102.0)


def test_the_last_row_tells_how_often_a_request_was_preempted() -> None:
    core = a_core()
    core.handle(a_request())
    turn(core)
    core.handle(UtilityCall(1, "sleep", [1]))

    rows = run(core, UtilityCall(2, "wake_up"))

    assert [row.num_preemptions for row in rows] == [0, 1]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_last_statistics_before_an_engine_idles_are_those_of_an_idle_engine(run_ahead: int) -> None:
    core = a_core(run_ahead=run_ahead)
    core.handle(a_request(max_tokens=100))
    turn(core)
    core.handle(Abort(["r"]))

    messages = [message for _ in range(5) for message in turn(core)]

    assert not core.is_busy
    assert messages[-1].stats is not None
    assert messages[-1].stats.num_running == 0
    assert messages[-1].stats.num_free_blocks == messages[-1].stats.num_blocks


def test_statistics_tell_sleep_and_what_must_wait() -> None:
    core = a_core()
    core.handle(UtilityCall(1, "pause", ["wait", False]))
    core.handle(a_request())
    (paused,) = turn(core)
    core.handle(UtilityCall(2, "sleep", [2]))
    (asleep,) = turn(core)
    core.handle(UtilityCall(3, "wake_up"))
    core.handle(UtilityCall(4, "resume"))
    awake = turn(core)[-1]

    assert paused.stats is not None
    assert asleep.stats is not None
    assert awake.stats is not None
    assert (paused.stats.num_waiting, paused.stats.num_deferred, paused.stats.sleep_level) == (1, 1, 0)
    assert (asleep.stats.num_deferred, asleep.stats.sleep_level) == (1, 2)
    assert (awake.stats.num_deferred, awake.stats.sleep_level) == (0, 0)
