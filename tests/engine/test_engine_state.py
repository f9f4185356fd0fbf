"""The tables of the control state: every call is idempotent, and every state has a way back."""

from __future__ import annotations

from typing import get_args

import pytest

from trio_llm.engine.device import WeightsLocation
from trio_llm.engine.engine_state import (
    PAUSES,
    SLEEP_STATES,
    EngineControlState,
    Pause,
    PauseEvent,
    SleepEvent,
    SleepState,
)


def test_each_table_knows_every_state() -> None:
    assert set(SLEEP_STATES) == set(SleepState)
    assert set(PAUSES) == set(Pause)


@pytest.mark.parametrize("sleep_state", SleepState)
@pytest.mark.parametrize("event", get_args(SleepEvent))
def test_a_second_equal_call_changes_nothing(sleep_state: SleepState, event: SleepEvent) -> None:
    state = EngineControlState(sleep_state=sleep_state)
    state.sleep_state = state.sleep_state_after(event)

    assert state.sleep_state_after(event) is state.sleep_state


@pytest.mark.parametrize("pause", Pause)
@pytest.mark.parametrize("event", get_args(PauseEvent))
def test_a_second_equal_pause_changes_nothing(pause: Pause, event: PauseEvent) -> None:
    state = EngineControlState(pause=pause)
    state.pause = state.pause_after(event)

    assert state.pause_after(event) is state.pause


@pytest.mark.parametrize("sleep_state", SleepState)
@pytest.mark.parametrize("order", [("wake weights", "wake kv_cache"), ("wake kv_cache", "wake weights")])
def test_waking_both_parts_wakes_from_every_state(sleep_state: SleepState, order: tuple[SleepEvent, ...]) -> None:
    state = EngineControlState(sleep_state=sleep_state)
    for event in order:
        state.sleep_state = state.sleep_state_after(event)

    assert state.sleep_state is SleepState.AWAKE


@pytest.mark.parametrize("sleep_state", SleepState)
def test_after_sleep_there_is_no_cache_and_dropped_weights_are_not_in_host_memory(sleep_state: SleepState) -> None:
    state = EngineControlState(sleep_state=sleep_state)
    was_dropped = sleep_state.weights is WeightsLocation.DROPPED

    first, second = state.sleep_state_after("sleep 1"), state.sleep_state_after("sleep 2")

    assert not first.has_cache
    assert first.weights is (WeightsLocation.DROPPED if was_dropped else WeightsLocation.HOST)
    assert (second.has_cache, second.weights, second.level) == (False, WeightsLocation.DROPPED, 2)


@pytest.mark.parametrize("sleep_state", SleepState)
def test_waking_a_part_touches_that_part_alone(sleep_state: SleepState) -> None:
    state = EngineControlState(sleep_state=sleep_state)

    assert state.sleep_state_after("wake weights").has_cache == sleep_state.has_cache
    assert state.sleep_state_after("wake weights").weights is WeightsLocation.DEVICE
    assert state.sleep_state_after("wake kv_cache").weights is sleep_state.weights
    assert state.sleep_state_after("wake kv_cache").has_cache


@pytest.mark.parametrize("sleep_state", SleepState)
@pytest.mark.parametrize("pause", Pause)
def test_steps_run_only_with_all_awake_and_not_in_a_pause_that_keeps(sleep_state: SleepState, pause: Pause) -> None:
    state = EngineControlState(sleep_state=sleep_state, pause=pause)

    assert state.may_step == (sleep_state is SleepState.AWAKE and pause is not Pause.KEEP)
    assert state.admits_new == (pause is Pause.RUNNING)
    assert state.describe()["sleep_level"] == sleep_state.level
