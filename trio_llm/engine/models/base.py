"""Model: what a worker needs of a model, whatever loaded it. KVShape: what the model needs in the cache.

Implemented by `CausalLM` and `SequenceClassifier`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trio_llm.engine.ops.attention import Attention

__all__ = ["KVShape", "Model"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token needs in the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Model(Protocol):
    """A loaded model: its layers, and apart from them its head. Not thread-safe: one step at a time.

    It runs in torch's inference mode, and keeps nothing of a step, neither the attention nor the cache.
    """

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def logits_width(self) -> int:
        """Size of the vocabulary: every token id is below it."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it can be asked for, in the words of `EngineClient.get_supported_tasks`."""
        ...

    @property
    def trained_len(self) -> int | None:
        """Tokens that the model was trained for, None if unknown."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Sorted."""
        ...

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What requests get that leave temperature, top_p or top_k open."""
        ...

    @property
    def probabilities(self) -> Callable[[Tensor], Tensor] | None:
        """float32[B, labels] of logits [B, labels]. None: the head names tokens, not classes."""
        ...

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run the layers: write K and V of the tokens, and return what the head reads.

        Args:
            token_ids, positions: [T], integers.
            attention: begun for these tokens.
        Returns:
            [T, H], in the model's dtype.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head: [B, H] to [B, V], in the model's dtype or float32. V of a classifier: its number of labels."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that hold the weights, by names of the model's own, each once.

        `Tensor.data` of any may be exchanged, and the model computes with what is there then.
        """
        ...

    def read_weights(self, source: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Read other weights of this very model: on the host, in the model's dtype, and with the names and shapes of
        `weights`.

        Args:
            source: a directory with the model; or all tensors of a checkpoint, by their names in it.

        Raises:
            EngineStartupError: there are no such weights; one line that names the directory or a tensor.
        """
        ...
