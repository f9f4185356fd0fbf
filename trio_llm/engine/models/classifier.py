"""SequenceClassifier: a model with a classification head in place of a language model's.

The generic path of `causal_lm.py`, with another head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from trio_llm.config import DType
from trio_llm.engine.models.causal_lm import CausalLM
from trio_llm.engine.models.pretrained import ModelKind, Pretrained, read_pretrained
from trio_llm.errors import EngineStartupError

__all__ = ["SequenceClassifier", "is_classifier", "load_classifier"]

_CLASSIFIERS: Final = ModelKind(
    auto_class=AutoModelForSequenceClassification,
    mapping=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    name="a classifier of sequences",
)
_SUFFIX: Final = "ForSequenceClassification"


class SequenceClassifier(CausalLM):
    """A decoder whose head `score` reads the last token of a sequence. `logits` gives one number per class.

    Raises:
        EngineStartupError: the head has another name, or as `CausalLM`.
    """

    tasks = ("embed", "classify")

    def __init__(self, loaded: Pretrained) -> None:
        super().__init__(loaded)
        self.num_labels: int = self.logits_width
        embeddings: Any = self._module.get_input_embeddings()
        self.logits_width = embeddings.weight.shape[0]

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """None: nothing is sampled."""
        return {}

    @property
    def probabilities(self) -> Callable[[Tensor], Tensor]:
        """What the head's numbers mean, as the configuration's `problem_type` says; else one class has a probability of
        its own, and several share one. For a regression: the numbers themselves.
        """
        kind = getattr(self._module.config, "problem_type", None)
        if kind == "regression":
            return Tensor.float
        if kind == "multi_label_classification" or self.num_labels == 1:
            return lambda logits: logits.float().sigmoid()
        return lambda logits: logits.float().softmax(dim=-1)

    def _split(self) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        # Not the model's own forward: it takes a batch for one sequence, and its last token for the one that counts.
        head = getattr(self._module, "score", None)
        if not isinstance(head, nn.Module):
            raise EngineStartupError(
                f"MODEL {str(self._loaded.model_dir)!r} cannot be served: its classification head is not named "
                "`score`; choose a decoder-only model"
            )
        return self._module.base_model, head


def load_classifier(model_dir: Path, *, dtype: DType, device: torch.device) -> SequenceClassifier:
    """Read a classifier. Arguments and errors: as `read_pretrained`."""
    return SequenceClassifier(read_pretrained(model_dir, dtype=dtype, device=device, kind=_CLASSIFIERS))


def is_classifier(model_dir: Path) -> bool:
    """The configuration of this directory names a classifier among its `architectures`."""
    try:
        names = json.loads((model_dir / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return False  # the loader that takes it says what is wrong
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(_SUFFIX) for name in names)
