"""CausalLM: any causal language model of transformers whose attention can be replaced, over our KV cache.

The generic path: transformers brings the modules and reads the weights; attention, cache and batching are
ours. Used by the torch executor. What cannot run exactly is refused at start-up with one line.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from trio_llm.config import DType
from trio_llm.engine.models.paged_attention import (
    ATTENTION_NAME,
    AttentionBatch,
    LayerCall,
    PagedStep,
    attach,
    register,
)
from trio_llm.errors import EngineStartupError

__all__ = ["CausalLM", "HiddenStates", "KVShape", "ModelKind", "load_causal_lm", "read_config"]

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies follow the longest sequence of the batch: answers would depend on neighbours."""


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


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """What the layers of a model gave in one step, before its head."""

    base_output: Any
    """Of the model without its head; `last_hidden_state` is [1, T, hidden]."""

    @property
    def tokens(self) -> Tensor:
        """[T, hidden], in the model's dtype."""
        states: Tensor = self.base_output.last_hidden_state[0]
        return states


class CausalLM:
    """A loaded model. Not thread-safe: one step at a time.

    Raises:
        EngineStartupError: a probe shows that the model does something that the paged cache cannot hold.
    """

    tasks: ClassVar[tuple[str, ...]] = ("generate", "embed", "score")

    def __init__(self, model: nn.Module, *, model_dir: Path) -> None:
        self._model = model
        self._step = PagedStep()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = model.device
        if model.base_model is model:  # `logits_at` runs the head alone
            raise _refuse(model_dir, "its layers and its head are one module")
        attach(model, self._step)
        self.kv_shape, self.logits_width = self._probe(model_dir)

    @property
    def module(self) -> nn.Module:
        """The module that holds the weights."""
        return self._model

    @property
    def max_position_embeddings(self) -> int | None:
        """Tokens that the model was trained for, if its configuration says so."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id that the generation configuration or the model's own names, sorted."""
        found: set[int] = set()
        for source in (getattr(self._model, "generation_config", None), self._model.config, self.config):
            ids = getattr(source, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return tuple(sorted(i for i in found if 0 <= i < self.logits_width))

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What the generation configuration sets of temperature, top_p and top_k, as far as it can be meant."""
        found: dict[str, Any] = self._model.generation_config.to_diff_dict()
        bounds = {"temperature": (0.0, 2.0), "top_p": (1e-6, 1.0), "top_k": (0, 2**31 - 1)}
        return {
            name: value
            for name, (low, high) in bounds.items()
            if isinstance(value := found.get(name), int | float) and low <= value <= high
        }

    def let_go(self) -> None:
        """Hold on to no cache between steps: the one of the last step may be freed."""
        self._step.end()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        *,
        kv: Tensor,
        attention: AttentionBatch,
    ) -> Tensor:
        """Run one step: write K and V of its tokens, return logits where asked.

        Args:
            token_ids, positions: int64[T].
            logits_rows: int64[B], indices among the T tokens.
            kv: [blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim].
        Returns:
            [B, V], in the model's dtype or float32.
        """
        self._step.begin(kv, attention)
        return self._run(token_ids, positions, logits_rows)

    @torch.inference_mode()
    def forward_and_keep(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        *,
        kv: Tensor,
        attention: AttentionBatch,
    ) -> tuple[Tensor, HiddenStates]:
        """As `forward`, and what `logits_at` needs for logits of any row."""
        kept: list[Any] = []
        hook = self._model.base_model.register_forward_hook(lambda module, args, output: kept.append(output))
        try:
            logits = self.forward(token_ids, positions, logits_rows, kv=kv, attention=attention)
        finally:
            hook.remove()
        return logits, HiddenStates(kept[-1])

    @torch.inference_mode()
    def logits_at(self, hidden: HiddenStates, rows: Tensor) -> Tensor:
        """Logits of some rows of a step: so many at once as the caller has memory for.

        The model's own code runs over layers that only repeat what they gave: scaling and soft caps are its business.

        Args:
            rows: int64[R], indices among the step's T tokens.
        Returns:
            [R, V], as `forward`.
        """
        again = copy.copy(hidden.base_output)
        again.last_hidden_state = hidden.base_output.last_hidden_state[:, rows]
        base = self._model.base_model
        base.forward = lambda *args, **kwargs: again
        try:
            nothing = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
            return self._run(nothing, nothing, torch.arange(len(rows), device=self.device))
        finally:
            del base.forward

    def _run(self, token_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        # `logits_to_keep` takes indices: scaling and soft caps of the logits stay the model's own business.
        keep = {"logits_to_keep": logits_rows} if self._keeps_logits else {}
        out = self._model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keep
        )
        logits: Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[logits_rows]

    @torch.inference_mode()
    def _probe(self, model_dir: Path) -> tuple[KVShape, int]:
        """Run one token, with attention that only notes who calls it with what."""
        calls: list[LayerCall] = []
        self._step.calls = calls
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            logits = self._run(zero, zero, zero)
        except Exception as error:
            raise _refuse(model_dir, f"it does not run in a packed batch: {_first_line(error)}") from error
        self._step.calls = None

        if obstacle := next((call.obstacle for call in calls if call.obstacle), None):
            raise _refuse(model_dir, f"it needs {obstacle}")
        num_layers: int = self.config.num_hidden_layers
        if sorted(call.layer for call in calls) != list(range(num_layers)):
            raise _refuse(model_dir, f"only {len(calls)} of its {num_layers} layers are plain attention")
        if len(shapes := {(call.num_kv_heads, call.key_dim, call.value_dim) for call in calls}) != 1:
            raise _refuse(model_dir, "its layers need caches of different shapes")
        num_kv_heads, key_dim, value_dim = shapes.pop()
        if key_dim != value_dim:
            raise _refuse(model_dir, f"its keys ({key_dim}) and values ({value_dim}) have different sizes")
        windows = {call.layer: call.window for call in calls}
        for layer, kind in enumerate(getattr(self.config, "layer_types", None) or ()):
            if kind == "sliding_attention" and windows[layer] is None:
                raise _refuse(model_dir, f"layer {layer} slides a window that it does not tell the attention function")
        return KVShape(num_layers, num_kv_heads, key_dim, self._model.dtype), logits.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Models with one sort of head."""

    auto_class: Any
    """transformers' class that loads them."""
    mapping: Any
    """Its table: classes by configuration."""
    name: str
    wrap: Callable[..., CausalLM]


_CAUSAL_LMS: Final = ModelKind(
    auto_class=AutoModelForCausalLM,
    mapping=MODEL_FOR_CAUSAL_LM_MAPPING,
    name="a causal language model",
    wrap=CausalLM,
)


def load_causal_lm(model_dir: Path, *, dtype: DType, device: torch.device, kind: ModelKind = _CAUSAL_LMS) -> CausalLM:
    """Read a model from a directory in Hugging Face form. Runs no code from it and reads no pickles.

    Args:
        dtype: auto: as the checkpoint says, but float32 on a processor that would only emulate its 16-bit type.
    Raises:
        EngineStartupError: the model is broken, or is one that we cannot run; one line that names MODEL.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    register()
    config = read_config(model_dir)
    _check_config(config, model_dir, kind)
    try:
        model, report = kind.auto_class.from_pretrained(
            model_dir,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise EngineStartupError(f"MODEL {str(model_dir)!r}: cannot load it: {_first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise EngineStartupError(
            f"MODEL {str(model_dir)!r}: its *.safetensors lack {len(missing)} of the model's weights, "
            f"for example {missing[0]}; download it again"
        )
    if dtype == "auto" and device.type == "cpu" and not _has_fast_cpu_kernels(model.dtype):
        model = model.to(torch.float32)  # exact, and several times faster than emulation; takes twice the memory
    try:
        model = model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise EngineStartupError(
            f"MODEL {str(model_dir)!r} does not fit into the memory of {device}: {_first_line(error)}"
        ) from error
    return kind.wrap(model, model_dir=model_dir)


def read_config(model_dir: Path) -> Any:
    """The configuration of a model, as transformers knows it. Reads no weights and runs no code.

    Raises:
        EngineStartupError: there is none that can be read.
    """
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise EngineStartupError(f"MODEL {str(model_dir)!r}: cannot read config.json: {_first_line(error)}") from error


def _check_config(config: Any, model_dir: Path, kind: ModelKind) -> None:
    """Refuse what can be told from the configuration alone, before any weight is read."""
    text_config = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise _refuse(model_dir, "its weights are quantised")
    if config.is_encoder_decoder:
        raise _refuse(model_dir, "it has an encoder")
    model_class = kind.mapping.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None:
        raise _refuse(model_dir, f"{config.model_type!r} is not {kind.name}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refuse(model_dir, f"transformers does not let the attention of {config.model_type!r} be replaced")
    if strange := set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYERS:
        raise _refuse(model_dir, f"it has layers of the kind {', '.join(sorted(strange))}")
    if kinds := _rope_types(config.to_dict()) & _BATCH_DEPENDENT_ROPE:
        raise _refuse(model_dir, f"its rotary embedding ({', '.join(sorted(kinds))}) depends on the whole batch")


def _has_fast_cpu_kernels(dtype: torch.dtype) -> bool:
    """oneDNN computes in this type on this processor; without that, torch falls back to loops of its own."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _rope_types(value: Any) -> set[str]:
    """Every `rope_type` in a configuration, which may hold one for all layers or one for each kind."""
    if not isinstance(value, dict):
        return set()
    found = {kind for key in ("rope_type", "type") if isinstance(kind := value.get(key), str)}
    return found.union(*map(_rope_types, value.values()))


def _refuse(model_dir: Path, why: str) -> EngineStartupError:
    return EngineStartupError(f"MODEL {str(model_dir)!r} cannot be served: {why}; choose a dense decoder-only model")


def _first_line(error: Exception) -> str:
    return next((line.strip()[:300] for line in str(error).splitlines() if line.strip()), type(error).__name__)
