"""Layers and head of a model run apart and give the logits of the whole, whatever the architecture does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    NanoChatConfig,
    OPTConfig,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.support.sequences import make_sequence
from tests.support.tiny_models import EOS, VOCABULARY, save_model, shape
from trio_llm.engine.models import causal_lm
from trio_llm.engine.models.causal_lm import load_causal_lm
from trio_llm.engine.models.split import Head, find_layers
from trio_llm.engine.ops.attention import TorchAttention
from trio_llm.engine.scheduling.step import ScheduledChunk, StepPlan
from trio_llm.engine.worker.buffers import StepBuffers
from trio_llm.engine.worker.host_batch import lay_out
from trio_llm.engine.worker.kv_cache import allocate_kv_cache
from trio_llm.errors import EngineStartupError

CPU = torch.device("cpu")
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}

HEADS: dict[str, Any] = {
    "a plain head": LlamaConfig(**shape()),
    "soft caps": Gemma2Config(**shape(final_logit_softcapping=8.0, query_pre_attn_scalar=8)),
    "soft caps of another kind": NanoChatConfig(**shape(final_logit_softcapping=4.0)),
    "logits that are multiplied": CohereConfig(**shape(logit_scale=0.3)),
    "logits that are divided": GraniteConfig(**shape(logits_scaling=3.0)),
    "experts, whose layers give more than hidden states": MixtralConfig(**shape(num_local_experts=4)),
    "layers two modules down": OPTConfig(
        **_SMALL, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, init_std=0.4,
    ),
    "a head with a bias, and positions that are gathered": GPTJConfig(
        **_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4, initializer_range=0.4
    ),
    "a head that is tied": GPT2Config(
        **_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_layers_and_head_give_the_logits_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, HEADS[kind])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = [(5 * i * i + i) % (VOCABULARY - 3) + 3 for i in range(40)]
    model = load_causal_lm(folder, dtype="float32", device=CPU)
    sequence = make_sequence("a", prompt, block_ids=[2, 0])
    plan = StepPlan((ScheduledChunk(sequence, 0, len(prompt), samples=True),))
    attention = TorchAttention()
    host = lay_out(plan, {}, pad_rows_to=0, trash_block=3)
    batch = StepBuffers(CPU, max_rows=1, depth=0).upload(host)

    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
        attention.begin(batch, allocate_kv_cache(3, model.kv_shape, CPU))
        hidden = model.hidden(batch.token_ids, batch.positions, attention)
        whole = model.logits(hidden)
        some = model.logits(hidden[[7, 39]])

    assert expected.std() > 0.01, "logits that are all alike prove nothing"
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(some, expected[[7, 39]], atol=1e-4, rtol=1e-4)


def test_a_head_computes_with_weights_that_were_exchanged(tmp_path: Path) -> None:
    model = load_causal_lm(save_model(tmp_path), dtype="float32", device=CPU)
    hidden = torch.randn(3, 32)
    with torch.inference_mode():
        before = model.logits(hidden)
        for tensor in model.weights.values():
            tensor.data = 2 * tensor.data

        assert torch.allclose(model.logits(hidden), 2 * before)


class _Layers(nn.Module):
    """Hidden states that depend on the token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)

    def forward(self, input_ids: Tensor, **_options: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.embedding(input_ids))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Module()
        self.outer.layers = _Layers()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, **_options: Any) -> Any:
        hidden = self.outer.layers(input_ids=input_ids).last_hidden_state
        return BaseModelOutputWithPast(last_hidden_state=hidden) | {"logits": self.head(hidden)}


def test_the_layers_are_the_outermost_module_that_gives_hidden_states_and_the_model_is_left_as_it_was() -> None:
    model = _Model()
    ids = torch.tensor([[3, 5]])

    layers = find_layers(model, lambda: model(input_ids=ids))

    assert layers is not None
    assert (layers.path, layers.module) == ("outer.layers", model.outer.layers)
    Head(model, layers)
    assert model.outer.layers is layers.module
    assert not layers.module._forward_hooks


def test_a_module_that_is_layers_and_head_in_one_has_no_layers_to_find() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    assert find_layers(model, lambda: model(torch.tensor([3]))) is None


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (lambda hidden: hidden @ torch.ones(32, VOCABULARY), "other logits when they run apart"),
        (lambda hidden: hidden.view(-1, 7), "do not run apart"),
    ],
)
def test_a_model_whose_head_does_not_give_the_same_alone_is_refused_with_one_line(
    head: Any, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path)
    monkeypatch.setattr(causal_lm, "Head", lambda model, layers: head)

    with pytest.raises(EngineStartupError) as caught:
        load_causal_lm(folder, dtype="float32", device=CPU)

    assert hint in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
