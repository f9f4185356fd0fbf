"""Loaders are a list: the first that takes a directory loads its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import CONFIGS, save_classifier, save_model
from trio_llm.engine.models.causal_lm import CausalLM
from trio_llm.engine.models.classifier import SequenceClassifier
from trio_llm.engine.models.load import LOADERS, Loader, load_model
from trio_llm.engine.models.pretrained import weights_of

CPU = torch.device("cpu")


def a_loader(name: str, *, takes: bool, calls: list[str]) -> Loader:
    def load(model_dir: Path, **_options: Any) -> Any:
        calls.append(f"{name} loads {model_dir.name}")
        return name

    def is_taken(model_dir: Path) -> bool:
        calls.append(f"{name} is asked")
        return takes

    return Loader(name, is_taken, load)


def test_the_first_loader_that_takes_a_directory_loads_it_and_no_later_one_is_asked() -> None:
    calls: list[str] = []
    loaders = [
        a_loader("first", takes=False, calls=calls),
        a_loader("second", takes=True, calls=calls),
        a_loader("third", takes=True, calls=calls),
    ]

    loaded: Any = load_model(Path("/models/mine"), dtype="auto", device=CPU, loaders=loaders)

    assert loaded == "second"
    assert calls == ["first is asked", "second is asked", "second loads mine"]


def test_the_last_loader_takes_every_directory_so_that_one_says_what_is_wrong(tmp_path: Path) -> None:
    assert LOADERS[-1].takes(tmp_path)
    assert LOADERS[-1].takes(tmp_path / "that is not there")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\x00", '{"architectures": {"a": 1}}'])
def test_no_loader_raises_when_it_is_asked_about_a_broken_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    assert [loader.takes(tmp_path) for loader in LOADERS] == [False, True]


def test_a_directory_is_loaded_as_what_its_configuration_names(tmp_path: Path) -> None:
    config = CONFIGS["llama with an untied head"]
    language = load_model(save_model(tmp_path / "a", config), dtype="float32", device=CPU)
    classifier = load_model(save_classifier(tmp_path / "b", config, num_labels=3), dtype="float32", device=CPU)

    assert (type(language), type(classifier)) == (CausalLM, SequenceClassifier)
    assert language.probabilities is None
    assert classifier.probabilities is not None
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_named_once_even_if_two_places_share_them(is_tied: bool, tmp_path: Path) -> None:
    kind = "llama with grouped queries" if is_tied else "llama with an untied head"
    model = load_model(save_model(tmp_path, CONFIGS[kind]), dtype="float32", device=CPU)

    names = list(model.weights)

    assert ("lm_head.weight" in names) == (not is_tied)
    assert len({id(tensor) for tensor in model.weights.values()}) == len(names)


def test_weights_that_are_read_again_have_the_names_shapes_and_type_of_those_in_use(tmp_path: Path) -> None:
    folder, other = save_model(tmp_path / "a"), save_model(tmp_path / "b", seed=1)
    model = load_model(folder, dtype="bfloat16", device=CPU)

    read = model.read_weights(other)

    assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in model.weights.items()
    }
    assert not any(torch.equal(read[name], tensor) for name, tensor in model.weights.items() if "proj" in name)


def test_buffers_that_are_saved_are_weights_and_others_are_not() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)

    assert set(weights_of(module)) == {"weight", "bias", "saved"}
