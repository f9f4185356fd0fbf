"""load_model: a model of whatever kind a directory holds. Used by the torch executor and the weight store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

from trio_llm.config import DType
from trio_llm.engine.models.causal_lm import CausalLM, load_causal_lm
from trio_llm.engine.models.classifier import CLASSIFIERS

__all__ = ["load_model"]

_SUFFIX: Final = "ForSequenceClassification"


def load_model(model_dir: Path, *, dtype: DType, device: torch.device) -> CausalLM:
    """Read a language model, or a classifier if its configuration names one among `architectures`.

    Arguments and errors: as `load_causal_lm`.
    """
    if _is_classifier(model_dir):
        return load_causal_lm(model_dir, dtype=dtype, device=device, kind=CLASSIFIERS)
    return load_causal_lm(model_dir, dtype=dtype, device=device)


def _is_classifier(model_dir: Path) -> bool:
    try:
        names = json.loads((model_dir / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return False  # whoever loads it says what is wrong
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_SUFFIX) for name in names)
