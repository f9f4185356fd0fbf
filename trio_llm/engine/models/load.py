"""load_model: a model of whatever kind a directory holds. Used by the torch executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from trio_llm.config import DType
from trio_llm.engine.models.base import Model
from trio_llm.engine.models.causal_lm import load_causal_lm
from trio_llm.engine.models.classifier import is_classifier, load_classifier

__all__ = ["LOADERS", "Loader", "load_model"]


class _Load(Protocol):
    def __call__(self, model_dir: Path, *, dtype: DType, device: torch.device) -> Model: ...


class _Takes(Protocol):
    def __call__(self, model_dir: Path) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to make a `Model` of a directory in Hugging Face form."""

    name: str
    takes: _Takes
    """It loads the model of this directory, or says what is wrong with it. Reads no weights and never raises."""
    load: _Load
    """Raises EngineStartupError."""


LOADERS: Final = (
    Loader("classifier", is_classifier, load_classifier),
    Loader("causal language model", lambda model_dir: True, load_causal_lm),
)
"""In order: the first that takes a directory loads it. The last one takes every directory."""


def load_model(model_dir: Path, *, dtype: DType, device: torch.device, loaders: Sequence[Loader] = LOADERS) -> Model:
    """Load a model with the first loader that takes its directory.

    Args:
        dtype: auto: as the checkpoint says, but float32 on a processor that would only emulate its 16-bit type.
    Raises:
        EngineStartupError: the model is broken, or is one that we cannot run; one line that names MODEL.
    """
    loader = next(loader for loader in loaders if loader.takes(model_dir))
    return loader.load(model_dir, dtype=dtype, device=device)
