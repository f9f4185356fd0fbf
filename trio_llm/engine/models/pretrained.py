"""Read a model of transformers from a directory in Hugging Face form, and refuse what cannot be served.

Runs no code from the directory and reads no pickles. Used by the generic model path; every refusal is one line.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from trio_llm.config import DType
from trio_llm.engine.models.paged_attention import ATTENTION_NAME, register
from trio_llm.errors import EngineStartupError

__all__ = [
    "ModelKind",
    "Pretrained",
    "build_module",
    "check_same_model",
    "first_line",
    "read_pretrained",
    "refusal",
    "weights_of",
]

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies follow the longest sequence of the batch: answers would depend on neighbours."""
_NO_MATTER: Final = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
"""Fields of a configuration in which two models that compute the same may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Models with one sort of head."""

    auto_class: Any
    """transformers' class that loads them."""
    mapping: Any
    """Its table: classes by configuration."""
    name: str
    """As it is to follow "is not"."""


@dataclass(frozen=True, slots=True, eq=False)
class Pretrained:
    """A module with its weights, and where they come from."""

    module: nn.Module
    kind: ModelKind
    model_dir: Path
    config: dict[str, Any]
    """As in config.json, with transformers' defaults for what that leaves out."""


def read_pretrained(model_dir: Path, *, dtype: DType, device: torch.device, kind: ModelKind) -> Pretrained:
    """Read a model and put it on the device.

    Args:
        dtype: auto: as the checkpoint says, but float32 on a processor that would only emulate its 16-bit type.
    Raises:
        EngineStartupError: the model is broken, or is one that we cannot run; the message names MODEL.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    register()
    config = _read_config(model_dir)
    fields: dict[str, Any] = config.to_dict()
    _check_config(config, model_dir, kind)
    try:
        module, report = kind.auto_class.from_pretrained(
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
        raise EngineStartupError(f"MODEL {str(model_dir)!r}: cannot load it: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise EngineStartupError(
            f"MODEL {str(model_dir)!r}: its *.safetensors lack {len(missing)} of the model's weights, "
            f"for example {missing[0]}; download it again"
        )
    if dtype == "auto" and device.type == "cpu" and not _has_fast_cpu_kernels(module.dtype):
        module = module.to(torch.float32)  # exact, and several times faster than emulation; takes twice the memory
    try:
        module = module.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise EngineStartupError(
            f"MODEL {str(model_dir)!r} does not fit into the memory of {device}: {first_line(error)}"
        ) from error
    return Pretrained(module, kind, model_dir, fields)


def build_module(ours: Pretrained, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> nn.Module:
    """A module of the same model with other weights, on the host.

    Args:
        tensors: of a checkpoint, by their names in it.

    Raises:
        EngineStartupError: some are missing, do not belong to the model, or have other shapes.
    """
    kind: Any = type(ours.module)
    try:
        module, report = kind.from_pretrained(
            None,
            config=copy.deepcopy(ours.module.config),
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
        )
    except Exception as error:
        raise EngineStartupError(f"the weights do not fit the model: {first_line(error)}") from error
    problems = {
        "missing_keys": "are missing",
        "unexpected_keys": "do not belong to the model",
        "mismatched_keys": "have another shape than the model's",
    }
    for keys, what in problems.items():
        if names := sorted(key if isinstance(key, str) else key[0] for key in report[keys]):
            raise EngineStartupError(f"{len(names)} weights {what}, for example {names[0]}")
    return cast(nn.Module, module)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, each once: of weights that are tied, the first name counts."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def check_same_model(ours: Pretrained, source: Path) -> None:
    """Compare the configuration of a directory with that of a model. Reads no weights: there may be no memory for those
    of another model.

    Raises:
        EngineStartupError: it is that of another model or cannot be read, or its index names files elsewhere.
    """
    if difference := find_difference(ours.config, _read_config(source).to_dict()):
        raise EngineStartupError(
            f"the model in {str(source)!r} is another one than the one that is served: {difference}"
        )
    _check_index(source)


def find_difference(ours: dict[Any, Any], theirs: dict[Any, Any]) -> str | None:
    """The first field in which two configurations differ, in words. Some have tables with numbers for keys."""
    for name in sorted(ours.keys() | theirs.keys(), key=str):
        if str(name).startswith("_") or name in _NO_MATTER:
            continue
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            if difference := find_difference(mine, other):
                return f"{name}.{difference}"
        elif mine != other:
            return f"{name} is {str(other)[:100]}, not {str(mine)[:100]}"
    return None


def refusal(model_dir: Path, why: str) -> EngineStartupError:
    return EngineStartupError(f"MODEL {str(model_dir)!r} cannot be served: {why}; choose a dense decoder-only model")


def first_line(error: Exception) -> str:
    return next((line.strip()[:300] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _read_config(model_dir: Path) -> Any:
    """The configuration of a model, as transformers knows it.

    Raises:
        EngineStartupError: there is none that can be read.
    """
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise EngineStartupError(f"MODEL {str(model_dir)!r}: cannot read config.json: {first_line(error)}") from error


def _check_config(config: Any, model_dir: Path, kind: ModelKind) -> None:
    """Refuse what the configuration alone shows to be impossible, before any weight is read."""
    text_config = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise refusal(model_dir, "its weights are quantised")
    if config.is_encoder_decoder:
        raise refusal(model_dir, "it has an encoder")
    model_class = kind.mapping.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None:
        raise refusal(model_dir, f"{config.model_type!r} is not {kind.name}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise refusal(model_dir, f"transformers does not let the attention of {config.model_type!r} be replaced")
    if unknown := set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYERS:
        raise refusal(model_dir, f"it has layers of the kind {', '.join(sorted(unknown))}")
    if kinds := _rope_types(config.to_dict()) & _BATCH_DEPENDENT_ROPE:
        raise refusal(model_dir, f"its rotary embedding ({', '.join(sorted(kinds))}) depends on the whole batch")


def _check_index(source: Path) -> None:
    """Weights in several files have an index: it may name files beside it and no others, so that no directory gives
    access to what lies elsewhere."""
    index = source / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        outside = sorted(name for name in names if Path(name).name != name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineStartupError(f"cannot read {str(index)!r}: {type(error).__name__}") from error
    if outside:
        raise EngineStartupError(f"{str(index)!r} names a file that is not beside it: {outside[0][:100]!r}")


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
