"""Small tokenizers of every family, made with the tokenizers library, as the content of a tokenizer.json.

Used by tests of text and rendering. The ids of single bytes are found with `byte_ids`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trio_llm.frontend.rendering.tokenizer import Tokenizer as OurTokenizer

__all__ = [
    "byte_fallback_json",
    "byte_ids",
    "byte_level_json",
    "decode",
    "load_tokenizer",
    "metaspace_json",
    "odd_byte_fallback_json",
    "vocab_size",
    "wordpiece_json",
]

SPECIAL = "<|end|>"


@functools.cache
def byte_level_json() -> bytes:
    """GPT-2's family: all 256 bytes, some merges (one ends inside an emoji), a special and a plain added token."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł"), ("ðŁ", "ĳ"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens(["<think>", "</think>", "a b"])
    return tokenizer.to_str().encode()


@functools.cache
def byte_fallback_json() -> bytes:
    """Llama 2's family: pieces with U+2581 for a space, a token for each byte, one space stripped in front."""
    tokenizer = _make_pieces()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.to_str().encode()


@functools.cache
def odd_byte_fallback_json() -> bytes:
    """Byte tokens behind a chain of decoders that has no table."""
    tokenizer = _make_pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer.to_str().encode()


@functools.cache
def metaspace_json() -> bytes:
    pieces = ["▁", "▁he", "▁hello", "▁world", "ě", "✨", *"abcdefghijklmnopqrstuvwxyz.,"]
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0)] + [(piece, -float(len(pieces))) for piece in pieces], 0, False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str().encode()


@functools.cache
def wordpiece_json() -> bytes:
    words = ["[UNK]", "[SEP]", "un", "##aff", "##able", "hello", "world", ".", ",", "do", "not", "n", "'", "t", "##s"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer.to_str().encode()


def vocab_size(content: bytes) -> int:
    """Every id of the tokenizer is below this."""
    return max(Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(content: bytes) -> OurTokenizer:
    """For a model that can emit each token of the vocabulary, and nothing else."""
    return OurTokenizer(content, logits_width=vocab_size(content))


def decode(tokenizer: OurTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """What the tokenizers library makes of all ids at once."""
    return tokenizer.table.decode(list(token_ids), skip_special_tokens)


def byte_ids(tokenizer: OurTokenizer, data: bytes) -> list[int]:
    """The ids of tokens that stand for one byte each."""
    single: dict[bytes, int] = {}
    for token_id, token_bytes in enumerate(tokenizer.table.bytes_by_id):
        single.setdefault(token_bytes, token_id)
    return [single[bytes([byte])] for byte in data]


def _make_pieces() -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", *"abcdefghijklmnopqrstuvwxyz.,ěďá", "▁h", "el", "lo", "▁w", "▁▁", "▁▁▁▁"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁", "w"), ("▁", "▁"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocab["<s>"])])
    return tokenizer
