"""SequenceClassifier: a model with a classification head in place of one that names tokens.

The generic path of `causal_lm.py`, with another head. Used by the torch executor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from trio_llm.engine.models.causal_lm import CausalLM, ModelKind
from trio_llm.errors import EngineStartupError

__all__ = ["CLASSIFIERS", "SequenceClassifier"]


class SequenceClassifier(CausalLM):
    """A decoder whose head `score` reads the last token of a sequence. `forward` gives one number a class.

    Raises:
        EngineStartupError: its head is not such, or as `CausalLM`.
    """

    tasks = ("embed", "classify")

    def __init__(self, model: nn.Module, *, model_dir: Path) -> None:
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Module):
            raise EngineStartupError(
                f"MODEL {str(model_dir)!r} cannot be served: its classification head is not named `score`; "
                "choose a decoder-only model"
            )
        self._head = head
        super().__init__(model, model_dir=model_dir)
        self.num_labels: int = self.logits_width
        embeddings: Any = self._model.get_input_embeddings()
        self.logits_width = embeddings.weight.shape[0]  # what prompts are checked against

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """None: nothing is sampled."""
        return {}

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the head's numbers mean, as the configuration's `problem_type` says; else one class has a probability of
        its own, and several share one.

        Args:
            logits: [B, labels].
        Returns:
            float32[B, labels]; of a model of regression the numbers themselves.
        """
        logits = logits.float()
        kind = getattr(self._model.config, "problem_type", None)
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or self.num_labels == 1:
            return logits.sigmoid()
        return logits.softmax(dim=-1)

    def _run(self, token_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        # Not the model's own forward: it takes a batch for one sequence, and its last token for the one that counts.
        base: Any = self._model.base_model
        out = base(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        logits: Tensor = self._head(out.last_hidden_state[0, logits_rows])
        return logits


CLASSIFIERS: Final = ModelKind(
    auto_class=AutoModelForSequenceClassification,
    mapping=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    name="a classifier of sequences",
    wrap=SequenceClassifier,
)
