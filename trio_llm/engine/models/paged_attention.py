"""The attention function that transformers' models call, in terms of our `Attention`.

Registered once under `ATTENTION_NAME`. Each attention module of a model carries a reference to the AttentionSlot of
that model, so nothing here is global but the registered name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trio_llm.engine.ops.attention import Attention

__all__ = ["ATTENTION_NAME", "AttentionSlot", "LayerCall", "attach", "register"]

ATTENTION_NAME = "trio_llm_paged"

_SLOT = "trio_llm_slot"
"""Name of the attribute on attention modules."""

_NOT_SUPPORTED = ("s_aux", "sinks", "position_bias")
"""Arguments that change what attention computes, and that we do not implement."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asked for in a probe: it says what the cache must hold."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    obstacle: str | None
    """Something this layer needs and we do not have."""


@dataclass(slots=True, eq=False)
class AttentionSlot:
    """Where the attention modules of one model find what to call. Filled for the time of a forward pass."""

    attention: Attention | None = None
    """None: a probe. Calls are noted, and attention gives zeros."""
    calls: list[LayerCall] | None = None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers. Doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)


def attach(model: nn.Module, slot: AttentionSlot) -> None:
    """Give the slot to every module that has a `layer_idx`."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _SLOT, slot)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers gives attention functions. Returns [1, T, Hq, D]."""
    slot: AttentionSlot = getattr(module, _SLOT)
    if slot.attention is None:
        assert slot.calls is not None, "a forward pass outside of a step"
        slot.calls.append(_note(module, key, value, attention_mask, options))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    scaling = options.get("scaling")
    layer: int = module.layer_idx
    slot.attention.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = slot.attention.attend(
        layer,
        query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )
    return out.unsqueeze(0), None


def _note(
    module: nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> LayerCall:
    obstacle = next((f"the attention option {name}" for name in _NOT_SUPPORTED if options.get(name) is not None), None)
    if attention_mask is not None:
        obstacle = "an attention mask of its own"
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        obstacle = "attention that looks ahead"
    return LayerCall(
        layer=module.layer_idx,
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        window=options.get("sliding_window"),
        obstacle=obstacle,
    )
