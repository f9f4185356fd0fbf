"""A converted GGUF file is a model that runs, with its own end token; a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.support.tiny_models import load
from trio_llm.engine.models.gguf_convert import conversion_key, convert_gguf
from trio_llm.errors import EngineStartupError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]]) -> Path:
    writer = GGUFWriter(path, metadata["general.architecture"])
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in metadata.items():
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HIDDEN, HEADS, KV_HEADS, LAYERS, MIDDLE = 32, 4, 2, 1, 64
LETTERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij", "Ġ", *"0123456789", "ab", "Ġa"]


def llama_metadata() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MIDDLE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": LETTERS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(LETTERS) - 3),
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def llama_tensors() -> dict[str, npt.NDArray[np.float32]]:
    shapes = {
        "token_embd.weight": (len(LETTERS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (MIDDLE, HIDDEN),
        "blk.0.ffn_up.weight": (MIDDLE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MIDDLE),
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_converted_llama_is_a_model_that_loads_with_its_own_end_token_and_template(tmp_path: Path) -> None:
    source, target = write_gguf(tmp_path / "f.gguf", llama_metadata(), llama_tensors()), tmp_path / "out"
    target.mkdir()
    heard: list[tuple[str, int, int]] = []

    convert_gguf(source, target, lambda *call: heard.append(call))

    assert load(target, num_gpu_blocks_override=4).info.eos_token_ids == (2,)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "temperature" not in json.loads((target / "generation_config.json").read_text())
    assert json.loads((target / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert heard == [("convert", done, 13) for done in range(14)]


def test_smollm2_gets_the_sampling_that_its_makers_recommend(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "f.gguf", llama_metadata() | {"general.basename": "smollm2"}, llama_tensors())
    convert_gguf(source, tmp_path, lambda *call: None)

    assert load(tmp_path, num_gpu_blocks_override=4).info.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_converted_query_rows_are_put_back_from_pairs_to_halves(tmp_path: Path) -> None:
    tensors = llama_tensors()
    rows = np.repeat(np.arange(HIDDEN, dtype=np.float32)[:, None], HIDDEN, axis=1)
    tensors["blk.0.attn_q.weight"] = rows
    convert_gguf(write_gguf(tmp_path / "f.gguf", llama_metadata(), tensors), tmp_path, lambda *call: None)

    found = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]

    assert found.dtype == torch.bfloat16
    assert found[:8, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert found[8:16, 0].tolist() == [8, 10, 12, 14, 9, 11, 13, 15]


def test_the_converted_tokenizer_merges_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "f.gguf", llama_metadata(), llama_tensors()), tmp_path, lambda *call: None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert tokenizer.encode("<|im_start|>abc a 12").tokens == ["<|im_start|>", "ab", "c", "Ġa", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab ab<|im_end|>").ids) == "ab ab"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"tokenizer.ggml.model": "llama"}, "byte-level"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(changes: dict[str, Any], hint: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "f.gguf", llama_metadata() | changes, llama_tensors())

    with pytest.raises(EngineStartupError, match=hint):
        convert_gguf(source, tmp_path, lambda *call: None)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused(kept: float, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "f.gguf", llama_metadata(), llama_tensors()).read_bytes()
    cut = write(tmp_path / "cut.gguf", whole[: int(len(whole) * kept)])

    with pytest.raises(EngineStartupError, match=r"cut\.gguf"):
        convert_gguf(cut, tmp_path, lambda *call: None)


def test_a_file_that_lacks_what_is_needed_is_refused(tmp_path: Path) -> None:
    metadata = llama_metadata()
    del metadata["tokenizer.ggml.eos_token_id"]

    with pytest.raises(EngineStartupError, match="eos_token_id"):
        convert_gguf(write_gguf(tmp_path / "f", metadata, llama_tensors()), tmp_path, lambda *call: None)


def test_the_key_of_a_conversion_changes_with_the_file_and_with_nothing_else(tmp_path: Path) -> None:
    one = write(tmp_path / "a", b"x" * 100)
    same = write(tmp_path / "b", b"x" * 100)
    longer = write(tmp_path / "c", b"x" * 101)
    other = write(tmp_path / "d", b"x" * 99 + b"y")

    assert conversion_key(one) == conversion_key(same)
    assert len({conversion_key(path) for path in (one, longer, other)}) == 3
