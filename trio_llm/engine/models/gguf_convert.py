"""Turn a Llama GGUF file with a byte-level BPE tokenizer into a directory in Hugging Face form, in bfloat16.

The package `gguf` reads the file; this module renames the weights and puts their rows into transformers' order.
transformers could convert as well, but parses the file three times, searches names quadratically (half a minute in
place of a few seconds), and loses that the tokenizer splits digits. Used once for the embedded model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from trio_llm.engine.device import ProgressCallback
from trio_llm.errors import EngineStartupError

__all__ = ["conversion_key", "convert_gguf"]


class GgufError(ValueError):
    """The file is damaged, or is not a plain Llama."""


_FORMAT_VERSION = 2
"""Raised whenever the result of a conversion changes, so that old results are not used."""
_SAMPLE_BYTES = 2**20

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_SMOLLM2_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Recommended by the model card of SmolLM2, and not part of GGUF files. At temperature 1 so small a model rambles."""
_CONTROL_TOKEN = 3
"""GGUF's type of tokens that are never part of a text."""
_EXTRA_STEPS = 2
"""Progress counts the tokenizer and the writing besides the tensors."""


def conversion_key(source: Path) -> str:
    """12 hex digits, different for different files and for different versions of this module."""
    digest = hashlib.blake2b(digest_size=6)
    size = source.stat().st_size
    digest.update(f"{_FORMAT_VERSION} {size} ".encode())
    with source.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def convert_gguf(source: Path, target: Path, progress: ProgressCallback) -> None:
    """Fill the empty directory `target`.

    Args:
        progress: called with the phase convert after every tensor.
    Raises:
        EngineStartupError: the file is damaged, or is not a Llama with a byte-level BPE tokenizer.
        OSError: it cannot be read, or the result cannot be written.
    """
    # Imported here: a model in Hugging Face form must load without this package.
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(source)
        values = {name: field.contents() for name, field in reader.fields.items()}
        names = [tensor.name for tensor in reader.tensors]
        total = len(names) + _EXTRA_STEPS
        progress("convert", 0, total)
        config = _config(values, names)
        _write_tokenizer(values, target)
        progress("convert", 1, total)
        weights: dict[str, Tensor] = {}
        for done, tensor in enumerate(reader.tensors, start=2):
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            weights[_weight_name(tensor.name)] = _weight(weight, tensor.name, config)
            progress("convert", done, total)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:  # what `gguf` raises for damaged files
        raise EngineStartupError(f"cannot convert {str(source)!r}: {error}; install it again") from error
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if values.get("general.basename") == "smollm2":
        generation |= _SMOLLM2_SAMPLING
    _write_json(target / "generation_config.json", generation)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # others may share the cache
    _write_json(target / "config.json", config)
    progress("convert", total, total)


def _config(values: dict[str, Any], tensor_names: list[str]) -> dict[str, Any]:
    if (architecture := values["general.architecture"]) != "llama":
        raise GgufError(f"its architecture is {architecture!r}, and only 'llama' is converted")
    if any(key.startswith("llama.rope.scaling.") for key in values):
        raise GgufError("its rotary embedding is scaled, which is not converted")
    num_heads = values["llama.attention.head_count"]
    hidden_size = values["llama.embedding_length"]
    eos = values["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id", eos),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": values["llama.feed_forward_length"],
        "head_dim": values.get("llama.attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": values["llama.context_length"],
        "num_attention_heads": num_heads,
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values.get("llama.attention.head_count_kv", num_heads),
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": values.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
    }


def _weight_name(name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    prefix, layer, rest = [*name.split(".", 2), "", ""][:3]
    if prefix != "blk" or rest not in _IN_LAYER:
        raise GgufError(f"tensor {name!r} is not part of a plain Llama")
    return f"model.layers.{int(layer)}.{_IN_LAYER[rest]}"


def _weight(weight: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
        # llama.cpp rotates neighbouring pairs, transformers the two halves of a head: put the rows back.
        weight = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight.to(torch.bfloat16).contiguous()


def _write_tokenizer(values: dict[str, Any], target: Path) -> None:
    if (kind := values["tokenizer.ggml.model"]) != "gpt2":
        raise GgufError(f"its tokenizer is {kind!r}, and only byte-level BPE ('gpt2') is converted")
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if values.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    types: list[int] = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _CONTROL_TOKEN
        ]
    )
    # Not tokenizer.save(): it raises a bare Exception when the disk is full.
    (target / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    named = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    special = {
        f"{name}_token": tokens[values[f"tokenizer.ggml.{key}"]]
        for name, key in named.items()
        if f"tokenizer.ggml.{key}" in values
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": values["llama.context_length"]}
    _write_json(target / "tokenizer_config.json", settings | special)
    if template := values.get("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
