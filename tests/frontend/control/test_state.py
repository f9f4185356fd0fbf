"""ControlState: a fresh engine that is told the replay is where the old one was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.test_control_calls import an_engine
from tests.support.weight_files import write_weights
from trio_llm.frontend.control.state import REPLAYED, ControlState

FOLDER = "the folder"
"""Stands for the test's own."""
CALLS = st.one_of(
    st.tuples(st.just("sleep"), st.tuples(st.sampled_from([1, 2]))),
    st.tuples(st.just("wake_up"), st.sampled_from([(), ("weights",), ("kv_cache",)])),
    st.tuples(st.just("pause"), st.tuples(st.sampled_from(["abort", "wait", "keep"]), st.booleans())),
    st.tuples(st.just("resume"), st.just(())),
    st.tuples(st.just("update_weights"), st.tuples(st.just(FOLDER), st.sampled_from(["v1", "v2"]))),
    st.tuples(st.just("init_weight_transfer_engine"), st.just((FOLDER,))),
    st.tuples(st.just("start_weight_update"), st.just(())),
    st.tuples(st.just("stage_weights"), st.sampled_from([("one",), ("two",), ("one", "two")])),
    st.tuples(st.just("prepare_weight_update"), st.just(())),
    st.tuples(st.just("finish_weight_update"), st.sampled_from([("v1",), ("v2",)])),
)


def test_the_state_of_a_fresh_engine_needs_no_call() -> None:
    assert ControlState().replay() == []
    assert msgspec.convert(an_engine().ask("control_state"), ControlState) == ControlState()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.lists(CALLS, max_size=12))
def test_the_replay_brings_a_fresh_engine_to_the_state_of_the_old_one(tmp_path: Path, calls: list[Any]) -> None:
    for number, name in enumerate(("one", "two")):
        write_weights(tmp_path / name, number)
    old, fresh = an_engine(), an_engine()
    for method, args in calls:
        old.call(method, *(str(tmp_path) if arg == FOLDER else arg for arg in args))
    state = msgspec.convert(old.ask("control_state"), ControlState)

    replay = state.replay()
    for call in replay:
        assert call.call_id == REPLAYED
        assert fresh.call(call.method, *call.args).error is None

    assert fresh.ask("control_state") == old.ask("control_state")
    assert state.is_asleep == (state.sleep_level > 0)
    assert state.is_held or fresh.core._control_calls.state.may_step
