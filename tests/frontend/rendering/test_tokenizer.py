"""The tokenizer: ids, bytes and bounds, and clear errors for directories that are no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from tests.support.tiny_tokenizers import load_tokenizer
from trio_llm.errors import EngineStartupError
from trio_llm.frontend.rendering.tokenizer import Tokenizer, read_tokenizer_config
from trio_llm.frontend.text.detokenizer import TokenIdError

BYTE_LEVEL = load_tokenizer(tiny_tokenizers.byte_level_json())
BYTE_FALLBACK = load_tokenizer(tiny_tokenizers.byte_fallback_json())
WORDPIECE = load_tokenizer(tiny_tokenizers.wordpiece_json())
METASPACE = load_tokenizer(tiny_tokenizers.metaspace_json())


def changed(content: bytes, **parts: Any) -> bytes:
    return json.dumps(json.loads(content) | parts).encode()


def test_special_tokens_are_added_on_demand() -> None:
    assert BYTE_FALLBACK.encode("he", add_special_tokens=True)[0] == 1
    assert BYTE_FALLBACK.encode("he", add_special_tokens=False)[0] != 1
    assert BYTE_FALLBACK.table.special_ids == {0, 1, 2}


def test_a_tokenizer_file_cannot_cut_or_fill_up_prompts() -> None:
    truncation: dict[str, Any] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding: dict[str, Any] = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    content = changed(tiny_tokenizers.byte_level_json(), truncation=truncation, padding=padding)

    assert len(load_tokenizer(content).encode("abcd", add_special_tokens=True)) == 4


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "byte_fallback"])
def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    singles = set(tokenizer.table.bytes_by_id)

    assert {bytes([byte]) for byte in range(256)} <= singles


def test_tokens_without_a_table_have_the_text_they_add_behind_another() -> None:
    [hello] = METASPACE.encode("hello", add_special_tokens=False)

    assert WORDPIECE.table.bytes_by_id[:5] == [b" [UNK]", b" [SEP]", b" un", b"aff", b"able"]
    assert METASPACE.table.token_bytes(hello) == b" hello"


@pytest.mark.parametrize("wrong", [-1, BYTE_LEVEL.table.logits_width, 2**63])
def test_an_id_outside_of_the_table_is_the_engines_fault(wrong: int) -> None:
    with pytest.raises(TokenIdError, match=f"token id {wrong}, "):
        BYTE_LEVEL.table.token_bytes(wrong)


def test_the_table_is_as_wide_as_the_logits() -> None:
    content = tiny_tokenizers.byte_level_json()

    assert len(Tokenizer(content, logits_width=1000).table.bytes_by_id) == 1000
    assert len(Tokenizer(content, logits_width=100).table.bytes_by_id) == 100


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "byte_fallback"])
def test_no_text_has_fewer_tokens_than_its_characters_allow(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.count_at_least(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_characters_that_the_vocabulary_lacks_do_not_count() -> None:
    content = json.loads(tiny_tokenizers.byte_level_json())
    control = BYTE_LEVEL.encode("\x04", add_special_tokens=False)
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if v not in control}
    tokenizer = load_tokenizer(json.dumps(content).encode())
    text = "\x04" * 100 + "</think>"

    assert len(tokenizer.encode(text, add_special_tokens=False)) == 1
    assert tokenizer.count_at_least(text) == 1


def test_the_bound_on_characters_is_the_longest_token() -> None:
    assert BYTE_LEVEL.max_token_chars == len("</think>")
    assert BYTE_FALLBACK.max_token_chars == len("<unk>")


def test_there_is_no_bound_where_one_token_can_swallow_any_text() -> None:
    content = tiny_tokenizers.byte_level_json()
    added = json.loads(content)["added_tokens"]
    removes = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}

    assert WORDPIECE.max_token_chars is None
    assert WORDPIECE.count_at_least("x" * 1000) == 0
    assert METASPACE.max_token_chars is None
    assert load_tokenizer(changed(content, added_tokens=[added[0] | {"rstrip": True}])).max_token_chars is None
    assert load_tokenizer(changed(content, normalizer={"type": "Lowercase"})).max_token_chars is None
    assert load_tokenizer(changed(content, pre_tokenizer=removes)).max_token_chars is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "Nonsense"}}', b"{" * 5000],
)
def test_a_broken_tokenizer_is_one_line_that_names_the_directory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)

    with pytest.raises(EngineStartupError, match=r"^MODEL '.*': tokenizer\.json is not usable: .+") as caught:
        Tokenizer.load(tmp_path, logits_width=300)

    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineStartupError, match=r"tokenizer\.json cannot be read \(No such file"):
        Tokenizer.load(tmp_path, logits_width=300)


def test_an_absurd_id_of_the_vocabulary_makes_no_big_table() -> None:
    content = json.loads(tiny_tokenizers.byte_level_json())
    content["model"]["vocab"]["absurd"] = 2**32 - 1

    assert len(Tokenizer(json.dumps(content).encode(), logits_width=300).table.bytes_by_id) == 300


def test_a_tokenizer_config_may_be_missing_but_not_broken(tmp_path: Path) -> None:
    assert read_tokenizer_config(tmp_path) == {}

    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(EngineStartupError, match=r"tokenizer_config\.json cannot be read"):
        read_tokenizer_config(tmp_path)
