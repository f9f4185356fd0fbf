"""A control call reaches every engine, or none: whatever fails where, all engines are in the same state afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.engine.test_control_calls import an_engine
from tests.frontend.control.test_state import CALLS, FOLDER
from tests.support.request_checks import open_checked_llm
from tests.support.weight_files import write_weights
from trio_llm import SamplingParams
from trio_llm.errors import EngineGenerateError, InvalidRequestError
from trio_llm.frontend.control.state import ControlState
from trio_llm.testing import FakeLLM

RESTARTING = {"on_engine_death": "restart", "num_engines": 3, "step_s": 0.01}


def fail(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, engine: int, *methods: str, times: int = 1000) -> None:
    """Let these methods of one engine's executor fail, so often."""
    executor = llm._executors[engine]
    for name in methods:
        method = getattr(executor, name)
        left = [times]

        def fail_or_do(*args: Any, _method: Any = method, _left: list[int] = left, **kwargs: Any) -> Any:
            if _left[0]:
                _left[0] -= 1
                raise RuntimeError("no memory")
            return _method(*args, **kwargs)

        monkeypatch.setattr(executor, name, fail_or_do)


def states(llm: FakeLLM) -> list[dict[str, Any]]:
    """What the engines themselves say, without the path of weights."""
    described = [core.core._control_calls.state.describe() for core in llm.cores]
    return [{name: value for name, value in one.items() if name != "weights_path"} for one in described]


async def settle(llm: FakeLLM) -> None:
    """Engines that were killed are there again."""
    with trio.fail_after(1000):
        while not all(engine.is_up for engine in llm._engines):  # noqa: ASYNC110 - no event says so
            await trio.sleep(0.1)
        await trio.sleep(1)


@pytest.mark.parametrize("engine", [0, 1, 2])
async def test_if_one_engine_cannot_sleep_none_does(
    engine: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        fail(monkeypatch, llm, engine, "move")

        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.sleep()

        assert not await llm.is_sleeping()
        assert {state["sleep_level"] for state in states(llm)} == {0}
        assert [one.num_restarts for one in llm._engines] == [0, 0, 0]
        assert (await llm.complete("Hello", max_tokens=3, ignore_eos=True)).finished


async def test_if_one_engine_cannot_wake_up_all_sleep_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        await llm.sleep(2)
        await llm.wake_up(["kv_cache"])
        before = states(llm)
        fail(monkeypatch, llm, 1, "move", times=1)

        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.wake_up()

        assert states(llm) == before
        await llm.wake_up()
        assert {state["sleep_level"] for state in states(llm)} == {0}


async def test_if_one_engine_cannot_take_weights_all_have_the_old_ones(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        fail(monkeypatch, llm, 2, "update_weights", times=1)

        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.update_weights(str(tmp_path), version="2")

        assert {state["weight_version"] for state in states(llm)} == {"default"}
        for engine in llm._engines:
            engine.kill("to see what is replayed")
        await settle(llm)
        assert {state["weight_version"] for state in states(llm)} == {"default"}

        await llm.update_weights(str(tmp_path), version="2")
        fail(monkeypatch, llm, 0, "update_weights", times=1)
        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.update_weights(str(tmp_path), version="3")
        assert {state["weight_version"] for state in states(llm)} == {"2"}


async def test_running_requests_go_on_with_the_tokens_of_the_old_weights_after_an_update_that_failed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        expected = (await llm.complete("Hello", max_tokens=300, temperature=0, ignore_eos=True)).outputs[0].token_ids
        fail(monkeypatch, llm, 2, "update_weights", times=1)
        token_ids: list[int] = []
        params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        async with llm.generate("Hello", params, data_parallel_rank=2) as stream:
            async for output in stream:
                token_ids += output.outputs[0].token_ids
                if len(token_ids) == 20:
                    with pytest.raises(EngineGenerateError):
                        await llm.update_weights(str(tmp_path), version="2")

        assert token_ids == expected, "its engine never had the new ones"


async def test_an_engine_that_cannot_be_brought_back_is_killed_and_its_next_incarnation_is_like_the_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        fail(monkeypatch, llm, 1, "move", times=1)
        move = llm._executors[0].move
        moves = []

        def sleep_and_never_wake(*args: Any, **kwargs: Any) -> Any:
            moves.append(args)
            if len(moves) == 2:
                raise RuntimeError("nothing to wake up with")
            return move(*args, **kwargs)

        monkeypatch.setattr(llm._executors[0], "move", sleep_and_never_wake)

        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.sleep()
        llm._executors[0].move = move  # type: ignore[method-assign]
        await trio.sleep(0.1)
        assert [one.is_up for one in llm._engines] == [False, True, True]
        assert "could not be brought back" in str(llm._engines[0].monitor.lost_reason)
        await settle(llm)

        assert {state["sleep_level"] for state in states(llm)} == {0}
        assert [one.num_restarts for one in llm._engines] == [1, 0, 0]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_that_one_engine_refuses_pauses_none(
    mode: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        calls = llm.cores[1].core._control_calls
        monkeypatch.setitem(calls._methods, "pause", lambda *args: 1 // 0)

        with pytest.raises(EngineGenerateError, match="ZeroDivisionError"):
            await llm.pause_generation(mode=mode)

        assert not await llm.is_paused()
        assert {state["pause"] for state in states(llm)} == {"running"}


async def test_what_all_engines_refuse_changes_none(autojump_clock: MockClock) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        with pytest.raises(InvalidRequestError):
            await llm.update_weights("/nowhere", version="2")

        assert [one.num_restarts for one in llm._engines] == [0, 0, 0]


async def test_a_cache_that_cannot_be_emptied_goes_with_its_engine_and_the_call_is_carried_out(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        monkeypatch.setitem(llm.cores[1].core._control_calls._methods, "reset_prefix_cache", lambda: 1 // 0)

        await llm.reset_prefix_cache()
        await trio.sleep(0.1)

        assert "could not be emptied" in str(llm._engines[1].monitor.lost_reason)
        await settle(llm)
        assert [one.num_restarts for one in llm._engines] == [0, 1, 0]


async def test_a_cache_reset_that_fails_everywhere_is_an_error(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(**RESTARTING) as llm:
        for core in llm.cores:
            monkeypatch.setitem(core.core._control_calls._methods, "reset_prefix_cache", lambda: 1 // 0)

        with pytest.raises(EngineGenerateError, match="ZeroDivisionError"):
            await llm.reset_prefix_cache()

        assert all(one.is_up for one in llm._engines)


async def test_a_profile_that_one_engine_cannot_begin_is_ended_on_the_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_checked_llm(profile_dir=str(tmp_path), **RESTARTING) as llm:
        done: list[str] = []
        for index, executor in enumerate(llm._executors):
            monkeypatch.setattr(executor, "start_profile", lambda folder, index=index: done.append(f"begin {index}"))
            monkeypatch.setattr(executor, "stop_profile", lambda index=index: done.append(f"end {index}"))
        fail(monkeypatch, llm, 1, "start_profile")

        with pytest.raises(EngineGenerateError, match="no memory"):
            await llm.start_profile()

        assert sorted(done) == ["begin 0", "begin 2", "end 0", "end 2"]


async def test_an_engine_that_dies_for_good_of_a_call_leaves_the_others_where_the_call_has_brought_them(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_checked_llm(num_engines=2, step_s=0.01) as llm:  # an engine is not started again
        monkeypatch.setattr(llm._executors[1], "move", lambda *args, **kwargs: llm.kill("lost", engine=1))

        await llm.sleep()

        assert await llm.is_sleeping()
        assert [one.is_dead for one in llm._engines] == [False, True]
        await llm.wake_up()
        assert (await llm.complete("Hello", max_tokens=3, ignore_eos=True)).finished


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(before=st.lists(CALLS, max_size=8), call=CALLS)
def test_the_calls_back_undo_any_call(tmp_path: Path, before: list[Any], call: Any) -> None:
    for number, name in enumerate(("one", "two")):
        write_weights(tmp_path / name, number)
    engine, folder = an_engine(), str(tmp_path)

    def make(method: str, args: Any) -> None:
        engine.call(method, *(folder if arg == FOLDER else arg for arg in args))

    def state() -> ControlState:
        return msgspec.convert(engine.ask("control_state"), ControlState)

    for one in before:
        make(*one)
    wanted = state()
    make(*call)

    for method, args in wanted.calls_from(state(), first_weights=folder):
        assert engine.call(method, *args).error is None

    back = state()
    if wanted.weights_path is None:  # the weights of the start have a path when they are taken again
        back = msgspec.structs.replace(back, weights_path=None)
    assert back == wanted
