"""Tiny random models in Hugging Face form, for tests: a few kilobytes, made in milliseconds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from trio_llm.config import EngineConfig
from trio_llm.engine.executor.torch_executor import TorchExecutor, load_torch

VOCABULARY = 97
EOS = 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # far enough from uniform that greedy answers do not hang on rounding
}


def shape(**fields: Any) -> dict[str, Any]:
    """Fields of most configurations that make a model tiny, and some more."""
    return _SHAPE | fields


CONFIGS: dict[str, Any] = {
    "llama with grouped queries": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama with an untied head": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
    "mistral with a window of 8": MistralConfig(**_SHAPE, sliding_window=8),
    "gemma2 with soft caps and mixed windows": Gemma2Config(
        **_SHAPE, sliding_window=16, attn_logit_softcapping=5.0, final_logit_softcapping=8.0, query_pre_attn_scalar=8
    ),
    "gpt2 with learned positions": GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=EOS,
        initializer_range=0.4,
    ),
}  # fmt: skip


def save_model(folder: Path, config: Any = None, *, seed: int = 0) -> Path:
    """Write a model with random weights and a tokenizer of one-letter words; returns the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or CONFIGS["llama with grouped queries"])
    return _save(folder, model)


def save_classifier(folder: Path, config: Any, *, num_labels: int, seed: int = 0) -> Path:
    """As `save_model`, with a head for classes in place of one for tokens."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    config.num_labels = num_labels
    config.pad_token_id = 0
    return _save(folder, AutoModelForSequenceClassification.from_config(config))


def _save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def mamba_config() -> Any:
    """A model without attention."""
    return MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)


def bert_config() -> Any:
    """An encoder: every token looks at all others."""
    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )


def load(folder: Path, **settings: Any) -> TorchExecutor:
    """An executor on the CPU in float32, with a small cache."""
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64}
    return load_torch(EngineConfig(model=str(folder), **(defaults | settings)), lambda phase, done, total: None)
