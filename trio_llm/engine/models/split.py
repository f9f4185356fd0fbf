"""Split a model of transformers into its layers and its head, so that each can run without the other.

The head is the model itself, with a stand-in for its layers that gives what it is given: scaling, soft caps and
whatever else an architecture does to its logits stay that architecture's own code. Used by `CausalLM`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Head", "Layers", "find_layers"]


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The part of a model that makes hidden states of token ids."""

    path: str
    """Name of the submodule, such as "model" or "model.decoder"."""
    module: nn.Module
    output_class: Any
    """What it returns: one of transformers' classes with a `last_hidden_state`."""


def find_layers(model: nn.Module, run: Callable[[], Any]) -> Layers | None:
    """The outermost submodule that gives hidden states when the model runs, None if there is none.

    Args:
        run: runs the model once.
    """
    found: list[Layers] = []

    def watch(path: str, module: nn.Module) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if getattr(output, "last_hidden_state", None) is not None:
                found.append(Layers(path, module, type(output)))

        return module.register_forward_hook(note)

    hooks = [watch(path, module) for path, module in model.named_modules() if module is not model]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[-1] if found else None  # the outermost one returns last


class Head:
    """Logits of hidden states, [B, H] to [B, V]. Shares its weights with the model."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self._stand_in = _StandIn(layers.output_class)
        self._model = _replaced(model, layers.path.split("."), self._stand_in)

    def __call__(self, hidden: Tensor) -> Tensor:
        self._stand_in.hidden = hidden.unsqueeze(0)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._stand_in.hidden = None
        return logits


class _StandIn(nn.Module):
    def __init__(self, output_class: Any) -> None:
        super().__init__()
        self._output_class = output_class
        self.hidden: Tensor | None = None  # [1, B, H]

    def forward(self, *_args: Any, **_options: Any) -> Any:
        assert self.hidden is not None
        return self._output_class(last_hidden_state=self.hidden)


def _replaced(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """A copy of the module with another submodule at this path, which shares all else."""
    copied = copy.copy(module)
    name, *rest = path
    children = dict(module._modules)
    children[name] = _replaced(getattr(module, name), rest, replacement) if rest else replacement
    copied.__dict__["_modules"] = children
    return copied
