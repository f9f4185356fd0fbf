"""Detokenizers: however ids are cut, the text is what the tokenizer itself makes of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from tests.support.tiny_tokenizers import byte_ids, decode, load_tokenizer
from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.rendering.tokenizer import Tokenizer
from trio_llm.frontend.text.detokenizer import Detokenizer, TokenIdError, make_detokenizer

BYTE_LEVEL = load_tokenizer(tiny_tokenizers.byte_level_json())
BYTE_FALLBACK = load_tokenizer(tiny_tokenizers.byte_fallback_json())
ODD = load_tokenizer(tiny_tokenizers.odd_byte_fallback_json())
METASPACE = load_tokenizer(tiny_tokenizers.metaspace_json())
WORDPIECE = load_tokenizer(tiny_tokenizers.wordpiece_json())
ALL = {
    "bytes": BYTE_LEVEL,
    "byte_fallback": BYTE_FALLBACK,
    "odd": ODD,
    "metaspace": METASPACE,
    "wordpiece": WORDPIECE,
}

TEXTS = [
    "hello world",
    "ďábelské 🔥👨‍👩‍👧 ódy",
    "e\N{COMBINING ACUTE ACCENT}a\N{COMBINING CARON} x",
    "🇨🇿🇨🇿👍🏽",
    "a    b\n\n  c",
    " leading and trailing ",
    "\N{REPLACEMENT CHARACTER} is a character too",
    "中文、日本語",
    "\0\x7f",
]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def detokenizer(tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip: bool = True) -> Detokenizer:
    return make_detokenizer(tokenizer.table, prompt, skip_special_tokens=skip)


def feed_all(stream: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join([stream.feed(piece) for piece in pieces]) + stream.finish()


def what_follows(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The oracle: what the whole text has more than the prompt's."""
    before = decode(tokenizer, prompt, skip_special_tokens=skip)
    whole = decode(tokenizer, prompt + output, skip_special_tokens=skip)
    # Only an unfinished character at the end of the prompt can look different in the whole.
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[len(list(same)) :]


def cuts(ids: list[int], places: set[int]) -> list[list[int]]:
    edges = [0, *sorted(place for place in places if place <= len(ids)), len(ids)]
    return [ids[low:high] for low, high in itertools.pairwise(edges)]


def test_each_family_of_tokenizers_is_decoded_in_the_way_meant_for_it() -> None:
    schemes = {name: tokenizer.table.scheme for name, tokenizer in ALL.items()}

    assert schemes == {
        "bytes": "bytes",
        "byte_fallback": "byte_fallback",
        "odd": "decode",
        "metaspace": "decode",
        "wordpiece": "decode",
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL)
def test_token_by_token_the_text_is_that_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)

    streamed = feed_all(detokenizer(tokenizer), [[token_id] for token_id in ids])

    assert streamed == decode(tokenizer, ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_valid_never_shows_a_replacement_character_on_the_way(tokenizer: Tokenizer, text: str) -> None:
    stream = detokenizer(tokenizer)

    shown = [stream.feed([token_id]) for token_id in byte_ids(tokenizer, text.encode())]

    assert "".join(shown) == text.removeprefix(" " if tokenizer is BYTE_FALLBACK else "")
    assert stream.finish() == ""


@given(text=st.text(), places=st.sets(st.integers(0, 40)), skip=st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL)
def test_the_cut_of_the_ids_does_not_change_the_text(
    tokenizer: Tokenizer, text: str, places: set[int], skip: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)

    streamed = feed_all(detokenizer(tokenizer, skip=skip), cuts(ids, places))

    assert streamed == decode(tokenizer, ids, skip_special_tokens=skip)


@given(
    prompt=st.lists(st.integers(0, BYTE_LEVEL.table.logits_width - 1), max_size=6),
    output=st.lists(st.integers(0, BYTE_LEVEL.table.logits_width - 1), max_size=12),
    places=st.sets(st.integers(0, 12)),
    skip=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_byte_level_any_ids_after_any_prompt_add_what_the_tokenizer_adds(
    prompt: list[int], output: list[int], places: set[int], skip: bool
) -> None:
    streamed = feed_all(detokenizer(BYTE_LEVEL, prompt, skip=skip), cuts(output, places))

    # A character that the answer completes belongs to it; all else of the prompt does not.
    assert streamed == what_follows(BYTE_LEVEL, prompt, output, skip=skip)


@given(data=st.binary(max_size=24), prompt=st.binary(max_size=5), places=st.sets(st.integers(0, 24)))
@settings(max_examples=200, deadline=None)
def test_byte_level_any_bytes_after_any_bytes_add_what_the_tokenizer_adds(
    data: bytes, prompt: bytes, places: set[int]
) -> None:
    before, ids = byte_ids(BYTE_LEVEL, prompt), byte_ids(BYTE_LEVEL, data)

    streamed = feed_all(detokenizer(BYTE_LEVEL, before), cuts(ids, places))

    assert streamed == what_follows(BYTE_LEVEL, before, ids)


def is_byte_token(token_id: int) -> bool:
    return 3 <= token_id < 3 + 256


@st.composite
def _pieces_with_honest_byte_runs(draw: st.DrawFn) -> list[int]:
    """Ids of the byte-fallback family in which each run of byte tokens is valid, or has no valid character at all."""
    text_ids = [i for i in range(BYTE_FALLBACK.table.logits_width) if not is_byte_token(i)]
    valid = st.text(
        st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]), min_size=1, max_size=3
    ).map(lambda text: byte_ids(BYTE_FALLBACK, text.encode()))
    truncated = st.sampled_from("🔥ě中").flatmap(
        lambda char: st.integers(1, len(char.encode()) - 1).map(lambda n: byte_ids(BYTE_FALLBACK, char.encode()[:n]))
    )
    run = st.one_of(valid, truncated)
    word = st.sampled_from([i for i in text_ids if i not in BYTE_FALLBACK.table.special_ids])
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        ids += [draw(word), *draw(run), draw(word)]
        if draw(st.booleans()):
            ids.append(draw(st.sampled_from(text_ids)))
    return ids + draw(truncated) if draw(st.booleans()) else ids


@given(
    ids=_pieces_with_honest_byte_runs(),
    split=st.integers(0, 30),
    places=st.sets(st.integers(0, 60)),
    skip=st.booleans(),
)
@settings(max_examples=120, deadline=None)
@pytest.mark.parametrize("prompt_is_whole", [True, False])
def test_byte_fallback_ids_add_what_the_tokenizer_adds(
    ids: list[int], split: int, places: set[int], skip: bool, prompt_is_whole: bool
) -> None:
    prompt, output = (ids[:split], ids[split:]) if not prompt_is_whole else ([], ids)
    # Of a run that ends inside a character, the tokenizer shows nothing as it is: no oracle for such a prompt.
    run = b"".join(reversed([bytes([i - 3]) for i in itertools.takewhile(is_byte_token, reversed(prompt))]))
    assume(run.decode("utf-8", "ignore") in ("", run.decode("utf-8", "replace")))

    streamed = feed_all(detokenizer(BYTE_FALLBACK, prompt, skip=skip), cuts(output, places))

    assert streamed == what_follows(BYTE_FALLBACK, prompt, output, skip=skip)


@given(
    prompt=st.lists(st.integers(0, 14), max_size=12),
    output=st.lists(st.integers(0, 14), max_size=12),
    places=st.sets(st.integers(0, 12)),
    skip=st.booleans(),
)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("tokenizer", [WORDPIECE, METASPACE], ids=["wordpiece", "metaspace"])
def test_without_a_table_any_ids_add_what_the_tokenizer_adds(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], places: set[int], skip: bool
) -> None:
    streamed = feed_all(detokenizer(tokenizer, prompt, skip=skip), cuts(output, places))

    assert streamed == what_follows(tokenizer, prompt, output, skip=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, ODD], ids=["bytes", "byte_fallback", "odd"])
def test_a_character_that_the_prompt_began_is_shown_once_and_whole(tokenizer: Tokenizer) -> None:
    prompt = [*tokenizer.encode("hello ", add_special_tokens=False), *byte_ids(tokenizer, b"\xf0\x9f")]
    stream = detokenizer(tokenizer, prompt)

    assert [stream.feed([token_id]) for token_id in byte_ids(tokenizer, b"\x8c\xb6")] == ["", "🌶"]
    assert stream.finish() == ""


def test_a_character_that_the_prompt_began_and_the_answer_drops_is_not_shown() -> None:
    stream = detokenizer(BYTE_LEVEL, byte_ids(BYTE_LEVEL, b"\xf0\x9f"))

    assert stream.feed(byte_ids(BYTE_LEVEL, b"\x8c")) == ""
    assert stream.feed(byte_ids(BYTE_LEVEL, b"a")) == "a"


def test_hopeless_bytes_show_at_once_and_hold_nothing_back() -> None:
    stream = detokenizer(BYTE_LEVEL)

    shown = [stream.feed([token_id]) for token_id in byte_ids(BYTE_LEVEL, b"\xff\xfe\xc0\x80a")]

    assert shown == [REPLACEMENT] * 4 + ["a"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "byte_fallback"])
@given(data=st.binary(max_size=30))
@settings(max_examples=200, deadline=None)
def test_at_most_three_bytes_are_held_and_only_if_they_can_become_a_character(
    tokenizer: Tokenizer, data: bytes
) -> None:
    stream = detokenizer(tokenizer)
    num_held = 0

    for byte, token_id in zip(data, byte_ids(tokenizer, data), strict=True):
        num_held = num_held + 1 if not stream.feed([token_id]) else 0
        if tokenizer is BYTE_FALLBACK and byte == 0x20:
            num_held = 0  # the space at the very start, which is no text

        assert num_held <= 3


@pytest.mark.parametrize("hopeless", [b"\xed\xa0", b"\xe0\x80", b"\xf4\x90", b"\xf0\x80", b"\xc0", b"\xf5"])
def test_bytes_that_cannot_become_valid_are_not_held(hopeless: bytes) -> None:
    stream = detokenizer(BYTE_LEVEL)

    shown = "".join([stream.feed([token_id]) for token_id in byte_ids(BYTE_LEVEL, hopeless)])

    assert shown == hopeless.decode("utf-8", "replace")
    assert stream.finish() == ""


def test_an_unfinished_tail_ends_as_one_replacement_character() -> None:
    stream = detokenizer(BYTE_LEVEL)

    assert stream.feed(byte_ids(BYTE_LEVEL, "x🔥".encode()[:-1])) == "x"
    assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""


def test_byte_fallback_shows_valid_characters_although_the_run_ends_badly() -> None:
    stream = detokenizer(BYTE_FALLBACK)

    shown = [stream.feed([token_id]) for token_id in byte_ids(BYTE_FALLBACK, "🔥".encode() + b"\xff")]

    assert shown == ["", "", "", "🔥", REPLACEMENT]


@pytest.mark.parametrize(("skip", "expected"), [(True, "ok1"), (False, "ok<|end|>1")])
def test_special_tokens_are_left_out_on_demand(skip: bool, expected: str) -> None:
    ids = BYTE_LEVEL.encode("ok<|end|>1", add_special_tokens=False)

    assert len(ids) == 4
    assert feed_all(detokenizer(BYTE_LEVEL, skip=skip), [[i] for i in ids]) == expected


def test_added_tokens_get_no_spaces_around_them() -> None:
    ids = BYTE_LEVEL.encode("<think>ok</think>1", add_special_tokens=False)

    assert feed_all(detokenizer(BYTE_LEVEL), [[i] for i in ids]) == "<think>ok</think>1"


def test_the_first_space_belongs_to_the_text_if_the_prompt_had_some() -> None:
    word = BYTE_FALLBACK.encode("hello", add_special_tokens=False)

    assert feed_all(detokenizer(BYTE_FALLBACK), [word]) == "hello"
    assert feed_all(detokenizer(BYTE_FALLBACK, [1]), [word]) == "hello"
    assert feed_all(detokenizer(BYTE_FALLBACK, word), [word]) == " hello"


@pytest.mark.parametrize("tokenizer_json", [tiny_tokenizers.byte_level_json, tiny_tokenizers.wordpiece_json])
@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**63, 300])
@pytest.mark.parametrize("before", [True, False])
def test_an_id_that_the_model_cannot_emit_fails_and_changes_nothing(
    tokenizer_json: Callable[[], bytes], wrong: int, before: bool
) -> None:
    tokenizer = Tokenizer(tokenizer_json(), logits_width=290)
    fire = "🔥".encode()
    ids = byte_ids(tokenizer, fire) if tokenizer.table.scheme == "bytes" else [2, 3, 4, 5]
    stream = detokenizer(tokenizer)
    expected = decode(tokenizer, ids, skip_special_tokens=True)
    shown = stream.feed(ids[:2])

    with pytest.raises(TokenIdError, match=f"token id {wrong}, the model's ids are 0 to 289") as caught:
        stream.feed([ids[2], wrong] if before else [wrong])

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EngineGenerateError)
    assert shown + stream.feed(ids[2:]) + stream.finish() == expected


@pytest.mark.parametrize("tokenizer_json", [tiny_tokenizers.byte_level_json, tiny_tokenizers.wordpiece_json])
def test_ids_that_only_pad_the_logits_have_no_text(tokenizer_json: Callable[[], bytes]) -> None:
    tokenizer = Tokenizer(tokenizer_json(), logits_width=512)
    known = tokenizer.encode("hello", add_special_tokens=False)
    stream = detokenizer(tokenizer, [511])

    assert stream.feed([511]) == ""
    assert stream.feed([500, *known, 501]) == "hello"


def test_no_ids_are_no_text() -> None:
    for tokenizer in ALL.values():
        assert detokenizer(tokenizer).feed([]) == ""


def test_a_long_row_of_invalid_bytes_without_a_table_loses_none() -> None:
    ids = [3 + 0xFF] * 100
    stream = detokenizer(ODD, ODD.encode("hello", add_special_tokens=False))

    shown = "".join([stream.feed([token_id]) for token_id in ids])

    assert len(shown) >= len(ids) - 3
    assert (
        shown + stream.finish() + stream.feed([ODD.encode("a", add_special_tokens=False)[-1]])
        == REPLACEMENT * 100 + "a"
    )


def test_special_tokens_that_follow_each_other_can_be_joined_without_spaces() -> None:
    (special,) = WORDPIECE.table.special_ids
    (word,) = WORDPIECE.encode("hello", add_special_tokens=False)
    name = decode(WORDPIECE, [special], skip_special_tokens=False)
    ids = [word, special, special, word, word]

    def text(*, skip: bool, spaces: bool) -> str:
        stream = make_detokenizer(WORDPIECE.table, [], skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        return feed_all(stream, [[i] for i in ids])

    spaced = text(skip=False, spaces=True)

    assert f"{name} {name}" in spaced
    assert text(skip=False, spaces=False) == spaced.replace(f"{name} {name}", name + name)
    assert text(skip=True, spaces=False) == text(skip=True, spaces=True)
