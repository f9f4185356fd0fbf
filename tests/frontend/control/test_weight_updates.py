"""Weights in several files, by the calls of a program: beside requests, cancelled anywhere, on two engines, and when
engines die in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.frontend.test_two_engines import TwoEngines, open_two, read
from tests.support.asking import BOUND_S, ask
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.weight_files import write_weights
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.sampling import SamplingParams
from trio_llm.testing import open_fake_llm


async def begin(llm: AsyncLLM, folder: Path) -> None:
    await llm.init_weight_transfer_engine({"directory": str(folder)})
    await llm.start_weight_update()


async def update(llm: AsyncLLM, folder: Path, version: str) -> None:
    """A whole update in two files."""
    await begin(llm, folder)
    for number in range(2):
        await llm.update_weights(update_info={"files": [write_weights(folder / f"part-{number}", number)]})
    await llm.finish_weight_update(weight_version=version)


async def checksums(llm: AsyncLLM) -> set[str]:
    return set(await llm.collective_rpc("weights_checksum", kwargs={"prefix": "weight"}))


async def test_requests_run_through_an_update_and_none_is_lost(tmp_path: Path) -> None:
    ends: list[Any] = []

    async def run(number: int) -> None:
        outputs = await ask(llm, f"prompt {number}", SamplingParams(max_tokens=200, ignore_eos=True))
        ends.append((outputs[-1].outputs[0].finish_reason, outputs[-1].weight_version))

    async with open_fake_llm() as llm:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(run, number)
            while llm.num_running < 5:
                await trio.lowlevel.checkpoint()
            await update(llm, tmp_path, "v2")
        await llm.assert_idle()

    assert ends == [("length", "v2")] * 5


async def test_updates_that_are_cancelled_at_any_checkpoint_leave_old_weights_or_new_ones(tmp_path: Path) -> None:
    async with open_fake_llm() as llm:
        found: set[str] = set()

        async def check() -> None:
            await llm.reset_prefix_cache()  # what has begun is over
            state = llm._control.state
            assert [state] == await llm._control.fetch_states()
            found.add(state.weight_version)
            await llm.update_weights(str(tmp_path), version="old")

        least = await cancel_at_every_checkpoint(lambda: update(llm, tmp_path, "new"), check)
        await llm.assert_idle()

    assert least > 4
    assert found == {"default", "old", "new"} or found == {"old", "new"}


async def test_several_programs_that_update_at_once_get_in_each_others_way_and_break_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    async def try_it(number: int) -> None:
        try:
            await update(llm, tmp_path, f"v{number}")
        except InvalidRequestError as error:
            refused.append(str(error))

    async with open_fake_llm() as llm:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(try_it, number)
        assert [llm._control.state] == await llm._control.fetch_states()
        await update(llm, tmp_path, "last")
        assert llm._control.state.weight_version == "last"
        assert llm._control.state.update_files is None

    assert all("no weight update is open" in text or "no files" in text for text in refused)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.init_weight_transfer_engine({}), "init_info"),
        (lambda llm: llm.init_weight_transfer_engine({"directory": "/", "backend": "x"}), "init_info"),
        (lambda llm: llm.init_weight_transfer_engine("/"), "init_info"),
        (lambda llm: llm.init_weight_transfer_engine({"directory": 5}), "init_info.directory"),
        (lambda llm: llm.init_weight_transfer_engine({"directory": "/no/such"}), "init_info.directory"),
        (lambda llm: llm.update_weights(), "version"),
        (lambda llm: llm.update_weights("/", version=None), "version"),
        (lambda llm: llm.update_weights("/", update_info={"files": ["a"]}), "update_info"),
        (lambda llm: llm.update_weights(version="v", update_info={"files": ["a"]}), "update_info"),
        (lambda llm: llm.update_weights(update_info={}), "update_info"),
        (lambda llm: llm.update_weights(update_info={"files": "a"}), "update_info.files"),
        (lambda llm: llm.update_weights(update_info={"files": [5]}), "update_info.files"),
        (lambda llm: llm.update_weights(update_info={"files": []}), "update_info.files"),
        (lambda llm: llm.update_weights(update_info={"files": ["missing"]}), "update_info.files"),
        (lambda llm: llm.finish_weight_update(weight_version=""), "weight_version"),
        (lambda llm: llm.collective_rpc("ping", kwargs={"a": []}), "kwargs"),
        (lambda llm: llm.collective_rpc("ping", kwargs={"a": 1}), "kwargs"),
        (lambda llm: llm.collective_rpc("ping", [1]), "args"),
        (lambda llm: llm.collective_rpc("weights_checksum", ["x"]), "prefix"),
    ],
)
async def test_what_is_wrong_is_named_and_changes_nothing(call: Any, param: str, tmp_path: Path) -> None:
    async with open_fake_llm() as llm:
        await begin(llm, tmp_path)
        before = llm._control.state

        with pytest.raises(InvalidRequestError) as caught:
            await call(llm)

        assert caught.value.param == param
        assert llm._control.state == before
        assert [before] == await llm._control.fetch_states()


async def test_an_update_reaches_every_engine(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_two() as (llm, _):
        before = await checksums(llm)
        await update(llm, tmp_path, "v2")

        assert await checksums(llm) != before
        assert len(await checksums(llm)) == 1
        infos = await llm.collective_rpc("model_info")
        assert [info["weight_version"] for info in infos] == ["v2", "v2"]


async def test_engines_that_have_read_different_files_do_not_take_them(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_two() as (llm, _):
        before = await checksums(llm)
        await begin(llm, tmp_path)
        name = write_weights(tmp_path / "part", 1)
        await llm.update_weights(update_info={"files": [name]})
        # The second engine has read the file late, when it had another content.
        write_weights(tmp_path / "part", 2)
        await llm._engines[1].utilities.call("stage_weights", name)

        with pytest.raises(InvalidRequestError, match="different files"):
            await llm.finish_weight_update(weight_version="v2")
        assert await checksums(llm) == before
        await llm.update_weights(update_info={"files": [name]})
        await llm.finish_weight_update(weight_version="v2")
        assert len(await checksums(llm)) == 1


async def die(llm: TwoEngines, index: int) -> None:
    """One engine dies, and the next one is where it was."""
    engine = llm._engines[index]
    num_restarts = engine.num_restarts
    llm.cores[index].kill("killed by the test")
    with trio.fail_after(BOUND_S):
        while engine.num_restarts == num_restarts or engine.is_under_control:  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.parametrize("moment", ["before the first file", "between two files", "before the finish", "after it"])
async def test_an_engine_that_dies_in_an_update_goes_on_with_it(
    moment: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    names = [write_weights(tmp_path / f"part-{number}", number) for number in range(2)]
    async with open_two() as (llm, _):
        before = await checksums(llm)
        await begin(llm, tmp_path)
        for number, when in enumerate(("before the first file", "between two files", "before the finish")):
            if moment == when:
                await die(llm, 1)
            if number < 2:
                await llm.update_weights(update_info={"files": names[number : number + 1]})
        await llm.finish_weight_update(weight_version="v2")
        if moment == "after it":
            await die(llm, 1)

        after = await checksums(llm)
        assert len(after) == 1
        assert after != before
        assert [state.weight_version for state in await llm._control.fetch_states()] == ["v2", "v2"]
        texts: dict[int, str] = {}
        await read(llm, [65, 66], texts)
        assert len(texts[66]) == 400


async def test_a_file_that_is_gone_keeps_no_engine_from_starting_and_none_from_going_with_the_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_two() as (llm, _):
        await begin(llm, tmp_path)
        name = write_weights(tmp_path / "part", 1)
        await llm.update_weights(update_info={"files": [name]})
        (tmp_path / name).unlink()
        await die(llm, 1)
        before = await checksums(llm)

        with pytest.raises(InvalidRequestError, match="is not a file"):
            await llm.finish_weight_update(weight_version="v2")
        assert await checksums(llm) == before, "the engine that has the file must not take it alone"
        write_weights(tmp_path / "part", 2)
        with pytest.raises(InvalidRequestError, match="has changed"):
            await llm.finish_weight_update(weight_version="v2")
        assert await checksums(llm) == before
        write_weights(tmp_path / "part", 1)
        await llm.finish_weight_update(weight_version="v2")
        assert len(await checksums(llm)) == 1
        texts: dict[int, str] = {}
        await read(llm, [65, 66], texts)
        assert len(texts[66]) == 400
