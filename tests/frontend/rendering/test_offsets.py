"""Offsets of a prompt's tokens in its text, compared with those that the tokenizers library finds when it encodes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from tests.support.tiny_tokenizers import load_tokenizer
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.rendering.renderer import Renderer

EXACT = {"byte_level": tiny_tokenizers.byte_level_json, "byte_fallback": tiny_tokenizers.byte_fallback_json}
OTHERS = {"metaspace": tiny_tokenizers.metaspace_json, "wordpiece": tiny_tokenizers.wordpiece_json}
TEXTS = st.text(st.sampled_from("he lo wé🎉ěx.\n"), min_size=1, max_size=12) | st.text(
    st.characters(codec="utf-8"), min_size=1, max_size=6
)
RENDERERS = {
    name: Renderer(load_tokenizer(make()), ChatTemplate(None), max_model_len=1000)
    for name, make in (EXACT | OTHERS).items()
}
LIBRARY = {name: tokenizers.Tokenizer.from_buffer(make()) for name, make in EXACT.items()}


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text="  ")
def test_offsets_are_those_of_the_tokenizer(name: str, text: str) -> None:
    encoding = LIBRARY[name].encode(text)

    assert RENDERERS[name]._find_offsets(encoding.ids, text) == [start for start, _ in encoding.offsets]


@pytest.mark.parametrize("name", EXACT)
async def test_tokens_of_a_split_character_share_its_place(name: str) -> None:
    text = "🎉 hello é"
    token_ids = await RENDERERS[name].render_prompt(text)
    offsets = await RENDERERS[name].render_offsets(token_ids, text)

    assert len(offsets) == len(token_ids)
    assert offsets.count(0) >= 2
    assert offsets[-1] == len(text) - 1


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, data=st.data())
def test_whatever_the_text_offsets_rise_and_stay_inside(name: str, text: str, data: st.DataObject) -> None:
    renderer = RENDERERS[name]
    width = renderer.token_table.logits_width
    token_ids = data.draw(st.lists(st.integers(0, width - 1), max_size=8))

    offsets = renderer._find_offsets(token_ids, text)

    assert len(offsets) == len(token_ids)
    assert all(0 <= offset <= len(text) for offset in offsets)
    assert all(one <= other for one, other in pairwise(offsets))


async def test_an_id_that_the_model_does_not_have_is_an_error_of_the_prompt() -> None:
    renderer = RENDERERS["byte_level"]

    with pytest.raises(InvalidRequestError) as caught:
        await renderer.render_offsets([renderer.token_table.logits_width], "x")

    assert caught.value.param == "prompt"
