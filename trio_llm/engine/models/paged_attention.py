"""The attention function that transformers' models call, over our own paged KV cache.

Registered once under `ATTENTION_NAME`. Each attention module of a model carries a reference to the
PagedStep of that model, so nothing here is global but the registered name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trio_llm.engine.ops.attention import AttentionRows, attend, clear_blocks, write_kv

__all__ = ["ATTENTION_NAME", "AttentionBatch", "LayerCall", "PagedStep", "attach", "register"]

ATTENTION_NAME = "trio_llm_paged"

_STEP = "trio_llm_step"
"""Name of the attribute on attention modules."""

_NOT_SUPPORTED = ("s_aux", "sinks", "position_bias")
"""Arguments that change what attention computes, and that we do not implement."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """What attention must know about one step. T tokens."""

    slot_blocks: Tensor  # int64[T]: block that takes each token's K and V
    slot_offsets: Tensor  # int64[T]: offset in that block
    fresh_blocks: Tensor  # int64[F]: blocks whose first slot is written by this step
    rows: tuple[AttentionRows, ...]
    """Every token is in exactly one."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asked for: noted by a probe, to know what the cache must hold."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    obstacle: str | None
    """Something this layer needs and we do not have."""


@dataclass(slots=True, eq=False)
class PagedStep:
    """What the attention modules of one model look at during a step; set before each forward pass."""

    kv: Tensor | None = None  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim]
    batch: AttentionBatch | None = None
    calls: list[LayerCall] | None = None
    """Not None: a probe. Calls are noted, nothing is computed."""

    def begin(self, kv: Tensor, batch: AttentionBatch) -> None:
        """Aim at this cache and this batch; clears the blocks that the batch begins."""
        self.kv, self.batch, self.calls = kv, batch, None
        if batch.fresh_blocks.numel():
            clear_blocks(kv, batch.fresh_blocks)

    def end(self) -> None:
        """Let go of both: the cache may be freed."""
        self.kv = self.batch = None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers. Doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)


def attach(model: nn.Module, step: PagedStep) -> None:
    """Give every module that has a `layer_idx` the step to look at."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _STEP, step)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The signature that transformers gives attention functions. Returns [1, T, Hq, D]."""
    step: PagedStep = getattr(module, _STEP)
    window: int | None = options.get("sliding_window")
    if step.calls is not None:
        step.calls.append(_note(module, key, value, attention_mask, options))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    assert step.kv is not None
    assert step.batch is not None
    layer: int = module.layer_idx
    batch = step.batch
    write_kv(
        step.kv,
        layer,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        (batch.slot_blocks, batch.slot_offsets),
    )
    tokens = query[0].transpose(0, 1)  # [T, Hq, D]
    scaling = options.get("scaling")
    out = query.new_empty(tokens.shape)
    for rows in batch.rows:
        out[rows.tokens] = attend(
            tokens,
            step.kv,
            layer,
            rows,
            scale=tokens.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
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
