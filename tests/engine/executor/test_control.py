"""Control calls with real weights: what slept or was exchanged gives the tokens of a fresh engine."""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.executor.test_torch_executor import make_prompt
from tests.engine.test_control_calls import Engine
from tests.support.tiny_models import CONFIGS, load, save_classifier, save_model
from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.device import DeviceLostError, WeightsLocation
from trio_llm.engine.executor.torch_executor import TorchExecutor
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING, EngineCoreRequest

KINDS = ["llama with an untied head", "gpt2 with learned positions"]
"""The second one's head is tied to its embeddings."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS[kind])


@pytest.fixture(scope="module")
def other(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return save_model(tmp_path_factory.mktemp("other"), CONFIGS[kind], seed=1)


def an_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineCore(load(folder), EngineConfig(model=str(folder), **settings), epoch=1, clock=lambda: 0.0))


def requests(prefix: str = "", **fields: Any) -> list[EngineCoreRequest]:
    params = [
        SamplingParams(temperature=0, seed=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=20, seed=6, max_tokens=12, ignore_eos=True),
    ]
    return [EngineCoreRequest(f"{prefix}{i}", make_prompt(20 + 15 * i), one, **fields) for i, one in enumerate(params)]


def answers(engine: Engine, prefix: str = "") -> list[list[int]]:
    return [engine.tokens(f"{prefix}{i}") for i in range(3)]


@functools.cache
def fresh_answers(folder: Path) -> list[list[int]]:
    engine = an_engine(folder)
    engine.send(*requests())
    engine.run()
    return answers(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_and_wake_running_and_new_requests_get_the_same_tokens(folder: Path, level: int) -> None:
    engine = an_engine(folder, run_ahead=1)
    engine.send(*requests())
    engine.step(7)

    engine.ask("sleep", level)
    asleep = engine.ask("collective_rpc", "memory_info")
    engine.ask("wake_up")
    awake = engine.ask("collective_rpc", "memory_info")
    engine.run()
    engine.send(*requests("new-"))
    engine.run()

    assert answers(engine) == answers(engine, "new-") == fresh_answers(folder)
    assert asleep["weights_device_bytes"] == asleep["kv_cache_bytes"] == 0
    assert (asleep["weights_host_bytes"] > 0) == (level == 1)
    assert awake["weights_device_bytes"] > 0
    assert awake["kv_cache_bytes"] > 0


def test_the_kv_cache_is_freed_and_held_by_nothing(folder: Path) -> None:
    engine = an_engine(folder)
    engine.send(*requests())
    engine.step(5)
    executor: Any = engine.core._executor
    address = executor._kv.untyped_storage().data_ptr()

    engine.ask("sleep", 1)

    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    assert executor._kv.numel() == 0
    assert tensors
    assert not [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() == address], "it is held somewhere"


def test_new_weights_give_what_a_fresh_engine_of_them_gives(folder: Path, other: Path) -> None:
    engine = an_engine(folder, run_ahead=1)
    engine.send(*requests())
    engine.step(7)

    engine.ask("update_weights", str(other), "v2")
    old = answers(engine)
    engine.run()
    engine.send(*requests("new-"))
    engine.run()

    assert answers(engine, "new-") == fresh_answers(other) != fresh_answers(folder)
    fresh = an_engine(other)
    fresh.send(
        *[
            EngineCoreRequest(one.request_id, one.prompt_token_ids, one.params, output_token_ids=tokens)
            for one, tokens in zip(requests(), old, strict=True)
        ]
    )
    fresh.run()
    assert answers(engine) == [before + after for before, after in zip(old, answers(fresh), strict=True)]
    assert all(old)


def test_dropped_weights_come_back_as_they_were_updated_last(folder: Path, other: Path) -> None:
    engine = an_engine(folder)
    engine.ask("update_weights", str(other), "v2")
    engine.ask("sleep", 2)
    engine.ask("wake_up")
    engine.send(*requests())
    engine.run()

    assert answers(engine) == fresh_answers(other)


def _without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path, metadata={"format": "pt"})


def _with_a_wrong_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors)
    tensors[name] = torch.zeros([size + 1 for size in tensors[name].shape])
    save_file(tensors, path, metadata={"format": "pt"})


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _of_other_numbers(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))


def _of_another_size(folder: Path) -> None:
    config = CONFIGS["llama with grouped queries"].to_dict() | {"num_hidden_layers": 1}
    save_model(folder, type(CONFIGS["llama with grouped queries"])(**config))


def _of_another_architecture(folder: Path) -> None:
    save_model(folder, CONFIGS["qwen3"])


def _with_an_index_that_leads_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    weight_map = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))


def _with_a_broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    "spoil",
    [
        _with_an_index_that_leads_out,
        _with_a_broken_index,
        _without_a_tensor,
        _with_a_wrong_shape,
        _truncated,
        _without_weights,
        _without_a_config,
        _of_other_numbers,
        _of_another_size,
        _of_another_architecture,
    ],
)
def test_a_directory_that_does_not_fit_is_the_callers_fault_and_changes_nothing(spoil: Any, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "served")
    bad = save_model(tmp_path / "bad", seed=1)
    spoil(bad)
    engine = an_engine(folder)
    engine.send(*requests())
    engine.step(7)

    result = engine.call("update_weights", str(bad), "v2")
    engine.run()

    assert result.error_kind == "invalid"
    assert str(bad) in str(result.error)
    assert "\n" not in str(result.error)
    assert answers(engine) == fresh_answers(folder)
    assert {message.weight_version for message in engine.messages} == {"default"}


def test_dropped_weights_whose_directory_is_gone_stay_asleep_until_it_is_back(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "served")
    expected = fresh_answers(folder)
    engine = an_engine(folder)
    engine.send(*requests())
    engine.step(7)
    engine.ask("sleep", 2)
    folder.rename(tmp_path / "away")

    result = engine.call("wake_up")
    assert result.error_kind == "failed"
    assert engine.ask("control_state")["weights_asleep"] is True
    (tmp_path / "away").rename(folder)
    engine.ask("wake_up")
    engine.run()

    assert answers(engine) == expected


def test_weights_that_cannot_be_written_end_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine(save_model(tmp_path / "served"))
    other = save_model(tmp_path / "other", seed=1)
    store: Any = engine.core._executor
    read = store._weights._read
    monkeypatch.setattr(store._weights, "_read", lambda source: dict(list(read(source).items())[:-1]))

    with pytest.raises(DeviceLostError, match="half-way"):
        engine.begin("update_weights", str(other), "v2")


def test_moving_weights_to_where_they_are_touches_no_tensor(tmp_path: Path) -> None:
    executor: TorchExecutor = load(save_model(tmp_path))
    weights = executor._model.weights
    before = {name: tensor.data_ptr() for name, tensor in weights.items()}

    for place in (WeightsLocation.DEVICE, WeightsLocation.HOST, WeightsLocation.HOST, WeightsLocation.DEVICE):
        executor.move(place, has_cache=True)

    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == before


def test_profiles_begun_and_ended_twenty_times_at_once_beside_requests_are_one_and_change_no_answer(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "served")
    engine = an_engine(folder, profile_dir=str(tmp_path / "profiles"))
    engine.send(*requests())
    engine.step(3)
    for _ in range(20):
        engine.ask("start_profile")
    engine.step(3)
    paths = [engine.ask("stop_profile") for _ in range(20)]
    engine.run()

    assert [path for path in paths if path is not None] == paths[:1]
    assert [str(path) for path in (tmp_path / "profiles").iterdir()] == paths[:1]
    assert answers(engine) == fresh_answers(folder)


def test_a_profile_is_a_trace_in_the_operators_folder(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "served")
    engine = an_engine(folder, profile_dir=str(tmp_path / "profiles"))
    assert engine.ask("stop_profile") is None

    paths = []
    for name in ("a", "b"):
        engine.ask("start_profile")
        engine.ask("start_profile")
        engine.send(*requests(name))
        engine.run()
        paths.append(Path(engine.ask("stop_profile")))
        assert engine.ask("stop_profile") is None

    assert len(set(paths)) == 2
    assert set((tmp_path / "profiles").iterdir()) == set(paths)
    events = json.loads(paths[0].read_text())["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)
    assert answers(engine, "a") == fresh_answers(folder)


def test_another_model_is_refused_before_its_weights_are_read(tmp_path: Path, folder: Path) -> None:
    engine = an_engine(folder)
    fields = json.loads((folder / "config.json").read_text())
    for name in ("intermediate_size", "n_inner"):  # of the one kind or of the other
        fields[name] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(fields))

    result = engine.call("update_weights", str(tmp_path), "v2")

    assert result.error_kind == "invalid"
    assert "another one than the one that is served" in str(result.error)


def test_a_classifier_takes_new_weights_and_reads_its_own_again_after_sleep(tmp_path: Path) -> None:
    config = CONFIGS[KINDS[0]]
    old, new = (
        save_classifier(tmp_path / name, config, num_labels=3, seed=seed) for name, seed in (("a", 0), ("b", 1))
    )
    engine, fresh = an_engine(old), an_engine(new)

    first = classes(engine, "first")
    engine.ask("sleep", 2)
    engine.ask("wake_up")
    assert classes(engine, "again") == first

    engine.ask("update_weights", str(new), "v2")
    assert classes(engine, "new") == classes(fresh, "new")
    assert classes(engine, "newer") != first


def classes(engine: Engine, name: str) -> bytes:
    params = PoolingParams(task="classify")
    engine.send(EngineCoreRequest(name, make_prompt(20), NO_SAMPLING, pooling_params=params))
    engine.run()
    (row,) = [row for row in engine.rows if row.request_id == name]
    assert row.pooled
    return row.pooled


# ---------------------------------------------------------------------------- weights in several files


def split(source: Path, target: Path, num_files: int = 3) -> list[str]:
    """The weights of a model in so many files of their own, without its configuration."""
    target.mkdir(exist_ok=True)
    tensors = list(load_file(source / "model.safetensors").items())
    names = [f"part-{number}.safetensors" for number in range(num_files)]
    for number, name in enumerate(names):
        save_file(dict(tensors[number::num_files]), target / name)
    return names


def begin(engine: Engine, folder: Path) -> None:
    engine.ask("init_weight_transfer_engine", str(folder))
    engine.ask("start_weight_update")


def test_weights_in_several_files_give_what_a_directory_gives(
    folder: Path, other: Path, tmp_path: Path, kind: str
) -> None:
    engine, by_directory = (an_engine(folder, run_ahead=1) for _ in range(2))
    begin(engine, tmp_path)
    for name in split(other, tmp_path):
        engine.ask("stage_weights", name)
    for one in (engine, by_directory):
        one.send(*requests())
        one.step(7)
    engine.ask("finish_weight_update", "v2")
    by_directory.ask("update_weights", str(other), "v2")
    for one in (engine, by_directory):
        one.run()
        one.send(*requests("new-"))
        one.run()

    assert answers(engine, "new-") == fresh_answers(other) != fresh_answers(folder)
    assert answers(engine) == answers(by_directory)
    checksums = {one.ask("collective_rpc", "weights_checksum") for one in (engine, by_directory, an_engine(other))}
    assert len(checksums) == 1
    assert an_engine(folder).ask("collective_rpc", "weights_checksum") not in checksums


def test_dropped_weights_are_read_again_from_the_files_and_only_if_those_are_the_same(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    names = split(other, tmp_path)
    engine = an_engine(folder)
    begin(engine, tmp_path)
    engine.ask("stage_weights", *names)
    engine.ask("finish_weight_update", "v2")
    engine.ask("sleep", 2)
    split(folder, tmp_path)

    result = engine.call("wake_up")
    assert result.error_kind == "failed"
    assert "has changed" in str(result.error)
    assert engine.ask("control_state")["weights_asleep"] is True
    split(other, tmp_path)
    engine.ask("wake_up")
    engine.send(*requests())
    engine.run()
    assert answers(engine) == fresh_answers(other)


def _lacking(folder: Path) -> str:
    (folder / "part-0.safetensors").unlink()
    return "missing"


def _with_another_shape(folder: Path) -> str:
    tensors = load_file(folder / "part-0.safetensors")
    name = max(tensors)
    save_file(tensors | {name: torch.zeros([size + 1 for size in tensors[name].shape])}, folder / "part-0.safetensors")
    return name


def _with_a_stranger(folder: Path) -> str:
    save_file({"model.stranger": torch.zeros(3)}, folder / "part-3.safetensors")
    return "model.stranger"


def _with_a_tensor_twice(folder: Path) -> str:
    tensors = load_file(folder / "part-0.safetensors")
    save_file({max(tensors): tensors[max(tensors)]}, folder / "part-3.safetensors")
    return "is in"


@pytest.mark.parametrize("spoil", [_lacking, _with_another_shape, _with_a_stranger, _with_a_tensor_twice])
def test_files_that_do_not_fit_are_refused_as_a_whole_and_can_be_completed(
    spoil: Any, folder: Path, other: Path, tmp_path: Path
) -> None:
    good = split(other, tmp_path / "good")
    split(other, tmp_path / "bad")
    reason = spoil(tmp_path / "bad")
    engine = an_engine(folder)
    engine.send(*requests())
    engine.step(7)
    begin(engine, tmp_path)
    before = engine.ask("collective_rpc", "weights_checksum")
    engine.ask("stage_weights", *sorted(f"bad/{path.name}" for path in (tmp_path / "bad").iterdir()))

    result = engine.call("finish_weight_update", "v2")
    engine.run()

    assert (result.error_kind, result.error_param) == ("invalid", "update_info.files")
    assert reason in str(result.error)
    assert "\n" not in str(result.error)
    assert engine.ask("collective_rpc", "weights_checksum") == before
    assert answers(engine) == fresh_answers(folder)
    assert {message.weight_version for message in engine.messages} == {"default"}
    engine.ask("start_weight_update")
    engine.ask("stage_weights", *(f"good/{name}" for name in good))
    engine.ask("finish_weight_update", "v2")
    engine.send(*requests("new-"))
    engine.run()
    assert answers(engine, "new-") == fresh_answers(other)


def test_a_classifier_takes_weights_in_several_files(tmp_path: Path) -> None:
    old, new = (
        save_classifier(tmp_path / name, CONFIGS[KINDS[0]], num_labels=3, seed=seed)
        for name, seed in (("a", 0), ("b", 1))
    )
    engine = an_engine(old)
    names = split(new, tmp_path / "parts")
    begin(engine, tmp_path / "parts")
    engine.ask("stage_weights", *names)
    engine.ask("finish_weight_update", "v2")

    assert classes(engine, "r") == classes(an_engine(new), "r")


def test_a_checksum_is_of_the_weights_that_are_asked_for(folder: Path) -> None:
    engine = an_engine(folder)
    names = sorted(engine.core._executor._model.weights)  # type: ignore[attr-defined]

    found = {engine.ask("collective_rpc", "weights_checksum", prefix) for prefix in ("", *names)}
    assert len(found) == len(names) + 1
    unknown = engine.call("collective_rpc", "weights_checksum", "no such")
    assert (unknown.error_kind, unknown.error_param) == ("invalid", "prefix")
    engine.ask("sleep", 2)
    assert "dropped" in str(engine.call("collective_rpc", "weights_checksum").error)
