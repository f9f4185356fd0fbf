"""A tiny Llama for the tests of this folder, written and loaded once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import load, save_model
from trio_llm.engine.executor.torch_executor import TorchExecutor


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def executor(llama_dir: Path) -> TorchExecutor:
    return load(llama_dir)
