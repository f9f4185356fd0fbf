"""Tokenizer: the model's tokenizer.json, for text to ids, and as a table for ids to text.

Blocking and thread-safe; imports neither torch nor transformers. Used by the renderer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from trio_llm.errors import EngineStartupError
from trio_llm.frontend.text.detokenizer import TokenScheme, TokenTable

__all__ = ["Tokenizer", "read_tokenizer_config"]

_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_Json = Mapping[str, Any]


class _ModelPart(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool | None = None


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that say how text and tokens relate; the big vocabulary is skipped over."""

    model: _ModelPart
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class Tokenizer:
    """A model's tokenizer.

    Args:
        tokenizer_json: content of a tokenizer.json.
        logits_width: number of ids that the model can emit.

    Raises:
        ValueError: the content is not a tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, *, logits_width: int) -> None:
        try:
            parts = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        # A file may ask to cut or to fill up texts, which would change a prompt silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = {token_id: token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        tokens |= {token_id: token.content for token_id, token in added.items()}
        special_ids = frozenset(i for i, token in added.items() if token.special)
        scheme, strips_first_space = _find_scheme(parts.decoder)
        known_bytes = self._read_bytes(tokens, scheme, special_ids)
        if any(step.get("type") == "ByteFallback" for step in _flatten(parts.decoder, "decoders")):
            known_bytes |= {i: _bytes_of_piece(token) for i, token in tokens.items() if _BYTE_TOKEN.fullmatch(token)}
        self.table: Final = TokenTable(
            logits_width=logits_width,
            bytes_by_id=[known_bytes.get(token_id, b"") for token_id in range(logits_width)],
            special_ids=special_ids,
            scheme=scheme,
            decode=self._decode,
            strips_first_space=strips_first_space,
        )
        trims = any(token.lstrip or token.rstrip for token in added.values())
        self.max_token_chars: int | None = None if trims else _bound_token_chars(parts, known_bytes, scheme)
        """Characters of text that one token can stand for at most. None: any number, for instance because a whole
        unknown word or a row of spaces becomes one token."""
        singles = {data for data in known_bytes.values() if len(data) == 1}
        # Some byte-level vocabularies lack control characters that their training text did not have.
        self._dropped_chars = [chr(byte) for byte in range(128) if bytes([byte]) not in singles]

    @classmethod
    def load(cls, model_dir: Path, *, logits_width: int) -> Tokenizer:
        """Read a model directory. Blocking, up to about a second; call it in a thread.

        Raises:
            EngineStartupError: there is no usable tokenizer.json; one line that names the directory.
        """
        path = model_dir / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise EngineStartupError(
                f"MODEL {str(model_dir)!r}: tokenizer.json cannot be read ({error.strerror}); "
                "give a directory in Hugging Face form that has one"
            ) from error
        try:
            return cls(content, logits_width=logits_width)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineStartupError(f"MODEL {str(model_dir)!r}: tokenizer.json is not usable: {reason}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids. Other threads run meanwhile: only the library's batch methods release the interpreter lock.

        `text` must be valid: a lone surrogate raises UnicodeEncodeError.
        """
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def count_at_least(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without encoding it. 0 if nothing is certain. Cheap."""
        if self.max_token_chars is None:
            return 0
        num_chars = len(text) - sum(map(text.count, self._dropped_chars))
        return -(-num_chars // self.max_token_chars)

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _read_bytes(self, tokens: dict[int, str], scheme: TokenScheme, special_ids: frozenset[int]) -> dict[int, bytes]:
        """For each known id the bytes that it adds to a text."""
        if scheme == "bytes":
            return {token_id: _bytes_of_byte_level(token) for token_id, token in tokens.items()}
        if scheme == "byte_fallback":
            return {token_id: _bytes_of_piece(token) for token_id, token in tokens.items()}
        # The first token of a text is often treated in a way of its own, so look at each as the second one.
        anchor = next((i for i in sorted(tokens) if i not in special_ids and self._decode([i], False).isalnum()), None)
        if anchor is None:
            return {token_id: self._decode([token_id], False).encode() for token_id in tokens}
        before = self._decode([anchor], False)
        texts = self._tokenizer.decode_batch([[anchor, token_id] for token_id in tokens], skip_special_tokens=False)
        return {
            token_id: text[len(before) :].encode()
            if text.startswith(before)
            else self._decode([token_id], False).encode()
            for token_id, text in zip(tokens, texts, strict=True)
        }


def read_tokenizer_config(model_dir: Path) -> dict[str, Any]:
    """The model's tokenizer_config.json; empty if there is none. Blocking.

    Raises:
        EngineStartupError: it is not a JSON object; one line that names the directory.
    """
    try:
        return msgspec.json.decode((model_dir / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineStartupError(f"MODEL {str(model_dir)!r}: tokenizer_config.json cannot be read: {error}") from error


# ------------------------------------------------------------------------------------- ids to bytes


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's way to write bytes as printable characters: those that print stand for themselves, the others are
    moved, in order, to U+0100 and above.

    Source: `bytes_to_unicode` in the GPT-2 release, kept by every byte-level BPE since.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE_LEVEL: Final = _byte_level_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[char] for char in token])
    except KeyError:
        # An added token with a space or another character outside the alphabet is meant literally.
        return token.encode()


def _bytes_of_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_METASPACE, " ").encode()


def _find_scheme(decoder: _Json | None) -> tuple[TokenScheme, bool]:
    """The scheme, and whether one space at the start is taken off."""
    steps = list(_flatten(decoder, "decoders"))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    is_pieces = kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_for_metaspace(steps[0])
    if is_pieces and len(steps) == 3:
        return "byte_fallback", False
    if is_pieces and steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return "byte_fallback", True
    return "decode", False


def _is_space_for_metaspace(step: _Json) -> bool:
    return bool(step.get("pattern") == {"String": _METASPACE} and step.get("content") == " ")


def _flatten(part: _Json | None, key: str) -> Iterator[_Json]:
    """The steps of a part, with nested sequences taken apart."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for step in part.get(key, []):
        yield from _flatten(step, key)


# ----------------------------------------------------------------------------- characters per token


def _bound_token_chars(parts: _TokenizerFile, known_bytes: Mapping[int, bytes], scheme: TokenScheme) -> int | None:
    """The bound, for tokenizers of which it is certain that every character ends up in some token.

    ASCII characters that a byte-level vocabulary lacks end up in none; they are for the caller to count out.
    """
    if parts.model.type != "BPE" or not _keeps_all_text(parts.pre_tokenizer):
        return None
    # Every character beyond ASCII has some byte from 80 to BF.
    if not {bytes([byte]) for byte in range(0x80, 0xC0)} <= set(known_bytes.values()):
        return None
    normalizers = list(_flatten(parts.normalizer, "normalizers"))
    if scheme == "bytes" and all(step.get("type") == "NFC" for step in normalizers):
        # Each character is one byte or more. Composing takes at most 4 characters to one of 3 bytes.
        longest = max(map(len, known_bytes.values()))
        return longest * 2 if normalizers else longest
    if scheme == "byte_fallback" and parts.model.byte_fallback and all(map(_adds_or_swaps_only, normalizers)):
        return max(len(data.decode("utf-8", "replace")) for data in known_bytes.values())
    return None


def _adds_or_swaps_only(normalizer: _Json) -> bool:
    is_swap = normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == _METASPACE
    return normalizer.get("type") == "Prepend" or (normalizer.get("type") == "Replace" and is_swap)


def _keeps_all_text(pre_tokenizer: _Json | None) -> bool:
    return all(
        step.get("type") in ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")
        and step.get("behavior") != "Removed"
        for step in _flatten(pre_tokenizer, "pretokenizers")
    )
