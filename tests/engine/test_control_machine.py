"""The tables of the control state: every call is idempotent, and every state has a way back."""

from __future__ import annotations

from typing import get_args

import pytest

from trio_llm.engine.control_machine import (
    PAUSES,
    RESIDENCES,
    ControlMachine,
    Pause,
    PauseEvent,
    Residence,
    ResidenceEvent,
    WeightsPlace,
)


def test_each_table_knows_every_state() -> None:
    assert set(RESIDENCES) == set(Residence)
    assert set(PAUSES) == set(Pause)


@pytest.mark.parametrize("residence", Residence)
@pytest.mark.parametrize("event", get_args(ResidenceEvent))
def test_a_second_equal_call_changes_nothing(residence: Residence, event: ResidenceEvent) -> None:
    machine = ControlMachine(residence=residence)
    machine.residence = machine.residence_after(event)

    assert machine.residence_after(event) is machine.residence


@pytest.mark.parametrize("pause", Pause)
@pytest.mark.parametrize("event", get_args(PauseEvent))
def test_a_second_equal_pause_changes_nothing(pause: Pause, event: PauseEvent) -> None:
    machine = ControlMachine(pause=pause)
    machine.pause = machine.pause_after(event)

    assert machine.pause_after(event) is machine.pause


@pytest.mark.parametrize("residence", Residence)
@pytest.mark.parametrize("order", [("wake weights", "wake kv_cache"), ("wake kv_cache", "wake weights")])
def test_waking_both_parts_wakes_from_every_state(residence: Residence, order: tuple[ResidenceEvent, ...]) -> None:
    machine = ControlMachine(residence=residence)
    for event in order:
        machine.residence = machine.residence_after(event)

    assert machine.residence is Residence.AWAKE


@pytest.mark.parametrize("residence", Residence)
def test_after_sleep_there_is_no_cache_and_dropped_weights_are_not_in_host_memory(residence: Residence) -> None:
    machine = ControlMachine(residence=residence)
    was_dropped = residence.weights is WeightsPlace.DROPPED

    first, second = machine.residence_after("sleep 1"), machine.residence_after("sleep 2")

    assert not first.has_cache
    assert first.weights is (WeightsPlace.DROPPED if was_dropped else WeightsPlace.HOST)
    assert (second.has_cache, second.weights, second.level) == (False, WeightsPlace.DROPPED, 2)


@pytest.mark.parametrize("residence", Residence)
def test_waking_a_part_touches_that_part_alone(residence: Residence) -> None:
    machine = ControlMachine(residence=residence)

    assert machine.residence_after("wake weights").has_cache == residence.has_cache
    assert machine.residence_after("wake weights").weights is WeightsPlace.DEVICE
    assert machine.residence_after("wake kv_cache").weights is residence.weights
    assert machine.residence_after("wake kv_cache").has_cache


@pytest.mark.parametrize("residence", Residence)
@pytest.mark.parametrize("pause", Pause)
def test_steps_run_only_with_all_awake_and_not_in_a_pause_that_keeps(residence: Residence, pause: Pause) -> None:
    machine = ControlMachine(residence=residence, pause=pause)

    assert machine.may_step == (residence is Residence.AWAKE and pause is not Pause.KEEP)
    assert machine.admits_new == (pause is Pause.RUNNING)
    assert machine.describe()["sleep_level"] == residence.level
