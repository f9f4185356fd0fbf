"""Weights in several files: taken all at once or not at all, from the files that were read and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_control_calls import LONG, Engine, an_engine, undisturbed
from tests.support.weight_files import write_weights
from trio_llm.engine.worker.weight_files import StagedFiles, WeightFile
from trio_llm.errors import EngineStartupError
from trio_llm.wire.messages import UtilityResult


def an_open_engine(folder: Path, *files: str) -> Engine:
    engine = an_engine()
    engine.ask("init_weight_transfer_engine", str(folder))
    engine.ask("start_weight_update")
    if files:
        engine.ask("stage_weights", *files)
    return engine


def parts(folder: Path, *values: float) -> list[str]:
    return [write_weights(folder / f"{value}.safetensors", value) for value in values]


def tokens(engine: Engine, request_id: str = "r") -> list[int]:
    engine.run()
    return engine.tokens(request_id)


def refused(result: UtilityResult) -> tuple[str, str | None]:
    assert result.error is not None
    assert result.error_kind == "invalid"
    return result.error, result.error_param


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_running_requests_go_on_with_the_new_weights_from_the_finish_on(run_ahead: int, tmp_path: Path) -> None:
    one, two = parts(tmp_path, 1, 2)
    engine = an_engine(run_ahead=run_ahead)
    engine.send(LONG)
    engine.step(4)
    engine.ask("init_weight_transfer_engine", str(tmp_path))
    engine.ask("start_weight_update")
    engine.ask("stage_weights", one)
    engine.step(3)
    engine.ask("stage_weights", two)
    engine.step(3)
    assert engine.messages[-1].weight_version == "default"
    state = engine.ask("finish_weight_update", "v2")
    old = engine.tokens()
    assert engine.core.stats.num_cached_blocks == 0

    assert old == undisturbed(LONG)[: len(old)]
    assert len(old) > 5
    of_old = [message for message in engine.messages if message.weight_version == "default"]
    assert [token_id for message in of_old for row in message.outputs for token_id in row.new_token_ids] == old
    assert tokens(engine)[: len(old)] == old
    assert tokens(engine) != undisturbed(LONG)
    assert len(tokens(engine)) == 30
    assert (state["weight_version"], state["weights_path"], state["update_files"]) == ("v2", str(tmp_path), None)
    assert [line.split("  ")[1] for line in state["weights_files"]] == [one, two]
    assert engine.messages[-1].weight_version == "v2"


def test_how_weights_are_shared_out_over_calls_does_not_matter(tmp_path: Path) -> None:
    files = parts(tmp_path, 1, 2, 3)
    answers = []
    for calls in ([files], [files[:1], files[1:]], [[name] for name in reversed(files)], [files, files[1:]]):
        engine = an_open_engine(tmp_path)
        for call in calls:
            engine.ask("stage_weights", *call)
        engine.ask("finish_weight_update", "v2")
        engine.send(LONG)
        answers.append(tokens(engine))

    assert answers[0] != undisturbed(LONG)
    assert answers == [answers[0]] * 4


def test_the_content_counts_that_was_read_and_not_what_is_written_later(tmp_path: Path) -> None:
    [name] = parts(tmp_path, 1)
    first = an_open_engine(tmp_path, name)
    write_weights(tmp_path / name, 5)
    late = an_open_engine(tmp_path, name)
    (tmp_path / name).unlink()

    for engine in (first, late):
        engine.ask("finish_weight_update", "v2")
        engine.send(LONG)
    assert tokens(first) != tokens(late)


def test_a_name_that_comes_again_is_read_again_and_the_older_content_is_forgotten(tmp_path: Path) -> None:
    [name] = parts(tmp_path, 1)
    engine = an_open_engine(tmp_path, name)
    write_weights(tmp_path / name, 5)
    state = engine.ask("stage_weights", name)
    executor: Any = engine.core._executor

    assert len(state["update_files"]) == 1
    assert len(executor._staged._by_checksum) == 1


def test_a_call_that_fails_keeps_what_earlier_calls_gave_and_nothing_of_its_own(tmp_path: Path) -> None:
    one, two = parts(tmp_path, 1, 2)
    engine = an_open_engine(tmp_path, one)
    before = engine.ask("control_state")

    error, param = refused(engine.call("stage_weights", two, "missing"))

    assert (param, "missing" in error) == ("update_info.files", True)
    assert engine.ask("control_state") == before
    executor: Any = engine.core._executor
    assert len(executor._staged._by_checksum) == 1


@pytest.mark.parametrize(
    ("method", "args", "param"),
    [
        ("stage_weights", ["0.safetensors"], None),
        ("finish_weight_update", ["v2"], None),
        ("start_weight_update", [], None),
        ("init_weight_transfer_engine", ["/no/such/folder"], "init_info.directory"),
        ("init_weight_transfer_engine", [""], "init_info.directory"),
        ("init_weight_transfer_engine", [5], "init_info.directory"),
        ("init_weight_transfer_engine", ["a\0b"], "init_info.directory"),
    ],
)
def test_steps_of_an_update_have_an_order(method: str, args: list[Any], param: str | None) -> None:
    engine = an_engine()
    before = engine.ask("control_state")

    assert refused(engine.call(method, *args))[1] == param
    assert engine.ask("control_state") == before


@pytest.mark.parametrize("name", ["", "..", "../x", "/", "missing", ".", "a\0b", "loop", "out", "x" * 300, 5, "text"])
def test_only_weights_below_the_directory_are_files_of_an_update(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_weights(tmp_path / "x")
    (folder / "out").symlink_to(tmp_path / "x")
    (folder / "loop").symlink_to("loop")
    (folder / "text").write_text("{}")
    engine = an_open_engine(folder)

    assert refused(engine.call("stage_weights", name))[1] == "update_info.files"
    assert engine.ask("control_state")["update_files"] == []


def test_an_update_without_files_is_none(tmp_path: Path) -> None:
    engine = an_open_engine(tmp_path)

    assert "no files" in refused(engine.call("finish_weight_update", "v2"))[0]
    refused(engine.call("stage_weights"))
    assert engine.ask("control_state")["weight_version"] == "default"


@pytest.mark.parametrize("version", ["", "x" * 257, None, 5])
def test_a_version_has_a_name(version: Any, tmp_path: Path) -> None:
    engine = an_open_engine(tmp_path, *parts(tmp_path, 1))

    assert refused(engine.call("finish_weight_update", version))[1] == "weight_version"
    assert len(engine.ask("control_state")["update_files"]) == 1


def test_a_finish_that_comes_twice_was_made_once(tmp_path: Path) -> None:
    engine = an_open_engine(tmp_path, *parts(tmp_path, 1))
    first = engine.ask("finish_weight_update", "v2")

    assert engine.ask("finish_weight_update", "v2") == first
    refused(engine.call("finish_weight_update", "v3"))


@pytest.mark.parametrize("method", ["start_weight_update", "init_weight_transfer_engine", "update_weights"])
def test_what_begins_anew_forgets_the_update_that_was_open(method: str, tmp_path: Path) -> None:
    engine = an_open_engine(tmp_path, *parts(tmp_path, 1))
    args = {"init_weight_transfer_engine": [str(tmp_path)], "update_weights": [str(tmp_path), "v2"]}

    state = engine.ask(method, *args.get(method, []))

    assert state["update_files"] == ([] if method == "start_weight_update" else None)
    executor: Any = engine.core._executor
    assert not executor._staged._by_checksum
    refused(engine.call("finish_weight_update", "v3"))


def test_weights_that_sleep_take_no_update_and_the_update_waits_for_them(tmp_path: Path) -> None:
    engine = an_open_engine(tmp_path, *parts(tmp_path, 1))
    engine.ask("sleep", 1)

    assert "asleep" in refused(engine.call("finish_weight_update", "v2"))[0]
    engine.ask("wake_up", "weights")
    assert engine.ask("finish_weight_update", "v2")["weight_version"] == "v2"


def test_a_new_incarnation_takes_the_same_files_or_none(tmp_path: Path) -> None:
    files = parts(tmp_path, 1, 2)
    old, new, late = an_open_engine(tmp_path, *files), an_engine(), an_engine()
    state = old.ask("finish_weight_update", "v2")

    assert new.ask("restore_weights", str(tmp_path), "v2", *state["weights_files"])["weight_version"] == "v2"
    for engine in (old, new):
        engine.send(LONG)
    assert tokens(old) == tokens(new) != undisturbed(LONG)
    write_weights(tmp_path / files[0], 7)
    error, _ = refused(late.call("restore_weights", str(tmp_path), "v2", *state["weights_files"]))
    assert "has changed" in error
    assert late.ask("control_state")["weight_version"] == "default"


def test_a_new_incarnation_goes_on_with_an_update_that_is_open(tmp_path: Path) -> None:
    one, two = parts(tmp_path, 1, 2)
    old, new = an_open_engine(tmp_path, one), an_engine()
    state = old.ask("control_state")

    new.ask("restore_weight_update", str(tmp_path), True, *state["update_files"])
    for engine in (old, new):
        engine.ask("stage_weights", two)
        engine.ask("finish_weight_update", "v2")
        engine.send(LONG)
    assert tokens(old) == tokens(new) != undisturbed(LONG)


def test_an_engine_can_be_brought_back_to_before_an_update(tmp_path: Path) -> None:
    one, two = parts(tmp_path, 1, 2)
    engine = an_open_engine(tmp_path, one)
    before = engine.ask("control_state")
    engine.ask("stage_weights", two)

    assert engine.ask("restore_weight_update", str(tmp_path), True, *before["update_files"]) == before
    executor: Any = engine.core._executor
    assert len(executor._staged._by_checksum) == 1
    assert engine.ask("restore_weight_update", None, False) == an_engine().ask("control_state")
    assert not executor._staged._by_checksum


@pytest.mark.parametrize(
    "data",
    [b"", b"\x02", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{", b"\x09" + b"\0" * 7 + b"{}"],
)
def test_a_file_in_another_form_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)

    with pytest.raises(EngineStartupError, match="is not a safetensors file") as caught:
        StagedFiles(bytes).stage(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)


def test_files_that_are_kept_are_not_read_again(tmp_path: Path) -> None:
    [name] = parts(tmp_path, 1)
    staged = StagedFiles(len)
    file = WeightFile(tmp_path / name, staged.stage(tmp_path / name))
    num_bytes = (tmp_path / name).stat().st_size
    (tmp_path / name).unlink()

    assert staged.collect([file]) == [num_bytes]
    staged.keep(())
    with pytest.raises(EngineStartupError, match="is not a file"):
        staged.collect([file])
