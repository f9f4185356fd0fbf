"""The tables of the control state: every call is idempotent, and every state has a way back."""

from __future__ import annotations

from typing import get_args

import pytest

from trio_llm.engine.device import WeightsLocation
from trio_llm.engine.engine_state import PAUSES, SLEEP_STATES, ControlMachine, Pause, PauseEvent, SleepEvent, SleepState


def test_each_table_knows_every_state() -> None:
    assert set(SLEEP_STATES) == set(SleepState)
    assert set(PAUSES) == set(Pause)


@pytest.mark.parametrize("residence", SleepState)
@pytest.mark.parametrize("event", get_args(SleepEvent))
def test_a_second_equal_call_changes_nothing(residence: SleepState, event: SleepEvent) -> None:
    machine = ControlMachine(residence=residence)
    machine.residence = machine.sleep_state_after(event)

    assert machine.sleep_state_after(event) is machine.residence


@pytest.mark.parametrize("pause", Pause)
@pytest.mark.parametrize("event", get_args(PauseEvent))
def test_a_second_equal_pause_changes_nothing(pause: Pause, event: PauseEvent) -> None:
    machine = ControlMachine(pause=pause)
    machine.pause = machine.pause_after(event)

    assert machine.pause_after(event) is machine.pause


@pytest.mark.parametrize("residence", SleepState)
@pytest.mark.parametrize("order", [("wake weights", "wake kv_cache"), ("wake kv_cache", "wake weights")])
def test_waking_both_parts_wakes_from_every_state(residence: SleepState, order: tuple[SleepEvent, ...]) -> None:
    machine = ControlMachine(residence=residence)
    for event in order:
        machine.residence = machine.sleep_state_after(event)

    assert machine.residence is SleepState.AWAKE


@pytest.mark.parametrize("residence", SleepState)
def test_after_sleep_there_is_no_cache_and_dropped_weights_are_not_in_host_memory(residence: SleepState) -> None:
    machine = ControlMachine(residence=residence)
    was_dropped = residence.weights is WeightsLocation.DROPPED

    first, second = machine.sleep_state_after("sleep 1"), machine.sleep_state_after("sleep 2")

    assert not first.has_cache
    assert first.weights is (WeightsLocation.DROPPED if was_dropped else WeightsLocation.HOST)
    assert (second.has_cache, second.weights, second.level) == (False, WeightsLocation.DROPPED, 2)


@pytest.mark.parametrize("residence", SleepState)
def test_waking_a_part_touches_that_part_alone(residence: SleepState) -> None:
    machine = ControlMachine(residence=residence)

    assert machine.sleep_state_after("wake weights").has_cache == residence.has_cache
    assert machine.sleep_state_after("wake weights").weights is WeightsLocation.DEVICE
    assert machine.sleep_state_after("wake kv_cache").weights is residence.weights
    assert machine.sleep_state_after("wake kv_cache").has_cache


@pytest.mark.parametrize("residence", SleepState)
@pytest.mark.parametrize("pause", Pause)
def test_steps_run_only_with_all_awake_and_not_in_a_pause_that_keeps(residence: SleepState, pause: Pause) -> None:
    machine = ControlMachine(residence=residence, pause=pause)

    assert machine.may_step == (residence is SleepState.AWAKE and pause is not Pause.KEEP)
    assert machine.admits_new == (pause is Pause.RUNNING)
    assert machine.describe()["sleep_level"] == residence.level
