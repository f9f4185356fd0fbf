"""CausalLM: any causal language model of transformers whose attention can be replaced, over our KV cache.

The generic path: transformers brings the modules and reads the weights; attention, cache and batching are ours. What
cannot run exactly is refused at start-up with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from trio_llm.config import DType
from trio_llm.engine.models.base import KVShape
from trio_llm.engine.models.paged_attention import AttentionSlot, LayerCall, attach
from trio_llm.engine.models.pretrained import (
    ModelKind,
    Pretrained,
    build_module,
    check_same_model,
    first_line,
    read_pretrained,
    refusal,
    weights_of,
)
from trio_llm.engine.models.split import Head, find_layers
from trio_llm.engine.ops.attention import Attention

__all__ = ["CausalLM", "load_causal_lm"]

_CAUSAL_LMS: Final = ModelKind(
    auto_class=AutoModelForCausalLM, mapping=MODEL_FOR_CAUSAL_LM_MAPPING, name="a causal language model"
)


class CausalLM:
    """A loaded model. A `Model`.

    Raises:
        EngineStartupError: a probe shows that the model does something that the paged cache cannot hold.
    """

    tasks: ClassVar[tuple[str, ...]] = ("generate", "embed", "score")

    def __init__(self, loaded: Pretrained) -> None:
        self._loaded = loaded
        self._module: Any = loaded.module
        self._config: Any = self._module.config.get_text_config()
        self._slot = AttentionSlot()
        self.device: torch.device = self._module.device
        self.weights: Mapping[str, Tensor] = weights_of(loaded.module)
        attach(loaded.module, self._slot)
        self._layers: nn.Module
        self._head: Callable[[Tensor], Tensor]
        self._layers, self._head = self._split()
        self.kv_shape, self.logits_width = self._probe()

    @property
    def trained_len(self) -> int | None:
        return getattr(self._config, "max_position_embeddings", None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id that the generation configuration or the model's own names, sorted."""
        found: set[int] = set()
        for source in (getattr(self._module, "generation_config", None), self._module.config, self._config):
            ids = getattr(source, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return tuple(sorted(i for i in found if 0 <= i < self.logits_width))

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What the generation configuration sets of temperature, top_p and top_k, where the value makes sense."""
        found: dict[str, Any] = self._module.generation_config.to_diff_dict()
        bounds = {"temperature": (0.0, 2.0), "top_p": (1e-6, 1.0), "top_k": (0, 2**31 - 1)}
        return {
            name: value
            for name, (low, high) in bounds.items()
            if isinstance(value := found.get(name), int | float) and low <= value <= high
        }

    @property
    def probabilities(self) -> Callable[[Tensor], Tensor] | None:
        return None

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        self._slot.attention = attention
        try:
            return self._run_layers(token_ids, positions)
        finally:
            self._slot.attention = None

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def read_weights(self, source: Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not isinstance(source, Path):
            return weights_of(build_module(self._loaded, source, dtype=self.kv_shape.dtype))
        check_same_model(self._loaded, source)
        dtype: Any = str(self.kv_shape.dtype).removeprefix("torch.")
        return weights_of(
            read_pretrained(source, dtype=dtype, device=torch.device("cpu"), kind=self._loaded.kind).module
        )

    def _run_layers(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        # As int64: some architectures gather by positions, which takes no other type.
        ids, places = token_ids.to(torch.int64).unsqueeze(0), positions.to(torch.int64).unsqueeze(0)
        hidden: Tensor = self._layers(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state[0]
        return hidden

    def _split(self) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        """The layers and the head, which together give what the whole model gives."""
        # Two tokens: one may be the padding, whose hidden states are 0 and prove nothing.
        tokens = torch.arange(2, dtype=torch.int64, device=self.device)
        ids = tokens.unsqueeze(0)
        logits: list[Tensor] = []

        def run_whole() -> None:
            logits.append(self._module(input_ids=ids, position_ids=ids, use_cache=False).logits[0])

        self._slot.calls = []
        with torch.inference_mode():
            try:
                layers = find_layers(self._module, run_whole)
            except Exception as error:
                raise self._refusal(f"it does not run in a packed batch: {first_line(error)}") from error
            if layers is None:
                raise self._refusal("its layers and its head are one module")
            self._layers, head = layers.module, Head(self._module, layers)
            try:
                parted = head(self._run_layers(tokens, tokens))
            except Exception as error:
                raise self._refusal(f"its layers and its head do not run apart: {first_line(error)}") from error
        if not torch.allclose(parted, logits[0], equal_nan=True):
            raise self._refusal("its layers and its head give other logits when they run apart")
        return layers.module, head

    @torch.inference_mode()
    def _probe(self) -> tuple[KVShape, int]:
        """Run one token, with attention that only notes which layer calls it with what."""
        calls: list[LayerCall] = []
        self._slot.calls = calls
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            logits = self._head(self._run_layers(zero, zero))
        except Exception as error:
            raise self._refusal(f"it does not run in a packed batch: {first_line(error)}") from error
        self._slot.calls = None

        if obstacle := next((call.obstacle for call in calls if call.obstacle), None):
            raise self._refusal(f"it needs {obstacle}")
        num_layers: int = self._config.num_hidden_layers
        if sorted(call.layer for call in calls) != list(range(num_layers)):
            raise self._refusal(f"only {len(calls)} of its {num_layers} layers are plain attention")
        if len(shapes := {(call.num_kv_heads, call.key_dim, call.value_dim) for call in calls}) != 1:
            raise self._refusal("its layers need caches of different shapes")
        num_kv_heads, key_dim, value_dim = shapes.pop()
        if key_dim != value_dim:
            raise self._refusal(f"its keys ({key_dim}) and values ({value_dim}) have different sizes")
        windows = {call.layer: call.window for call in calls}
        for layer, kind in enumerate(getattr(self._config, "layer_types", None) or ()):
            if kind == "sliding_attention" and windows[layer] is None:
                raise self._refusal(f"layer {layer} slides a window that it does not pass to the attention function")
        return KVShape(num_layers, num_kv_heads, key_dim, self._module.dtype), logits.shape[-1]

    def _refusal(self, why: str) -> Exception:
        return refusal(self._loaded.model_dir, why)


def load_causal_lm(model_dir: Path, *, dtype: DType, device: torch.device) -> CausalLM:
    """Read a language model. Arguments and errors: as `read_pretrained`."""
    return CausalLM(read_pretrained(model_dir, dtype=dtype, device=device, kind=_CAUSAL_LMS))
