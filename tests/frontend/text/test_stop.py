"""Stop strings: no part of one is shown, the first to complete wins, and the cut of the text changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.frontend.text.stop import StopScanner


def expected(text: str, stops: Sequence[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The oracle: look at the whole text from every end, in order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


def scan(pieces: Sequence[str], stops: Sequence[str], *, include_stop: bool) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include_stop=include_stop)
    shown = "".join([scanner.feed(piece) for piece in pieces])
    return shown + scanner.finish(), scanner.found


def every_cut(text: str) -> Iterator[list[str]]:
    for is_edge in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        pieces = [""]
        for char, edge in zip(text, [False, *is_edge], strict=False):
            if edge:
                pieces.append("")
            pieces[-1] += char
        yield pieces


EXAMPLES = [
    ("the ABCDEFGHIJ", ["DEFGHIJ"]),
    ("abcd", ["bcd", "ab"]),
    ("abcd", ["bcd", "abcd"]),
    ("xabcd", ["abcd", "bcd"]),
    ("xxabcxx", ["abcd", "bc"]),
    ("aabaabaac", ["aabaac"]),
    ("ab</en</end>", ["</end>", "</s>"]),
    ("text \n\n", ["\n\n\n"]),
    ("end with <", ["</end>"]),
    ("🔥👨‍👩‍👧", ["👩"]),
    ("plain", []),
    ("aaaa", ["a"]),
]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(("text", "stops"), EXAMPLES)
def test_every_cut_gives_the_same_text_and_stop(text: str, stops: list[str], include_stop: bool) -> None:
    for pieces in every_cut(text):
        assert scan(pieces, stops, include_stop=include_stop) == expected(text, stops, include_stop=include_stop), (
            pieces
        )


_small_text = st.text("ab<\n", max_size=24)


@given(
    text=_small_text,
    stops=st.lists(st.text("ab<\n", min_size=1, max_size=5), max_size=5),
    places=st.sets(st.integers(0, 24)),
    include_stop=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_the_cut_of_the_text_does_not_change_the_answer(
    text: str, stops: list[str], places: set[int], include_stop: bool
) -> None:
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(edges)]

    assert scan(pieces, stops, include_stop=include_stop) == expected(text, stops, include_stop=include_stop)


@given(text=_small_text, stops=st.lists(st.text("ab<\n", min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_held_text_is_always_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops, include_stop=False)
    shown = ""

    for end, char in enumerate(text, start=1):
        shown += scanner.feed(char)
        if scanner.found is not None:
            return
        held = text[len(shown) : end]
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        assert held == max([b for b in beginnings if text[:end].endswith(b)], key=len)


def test_nothing_of_a_stop_string_is_shown_and_nothing_after_it() -> None:
    scanner = StopScanner(["DEFGHIJ"], include_stop=False)

    assert [scanner.feed(piece) for piece in ["the ABC", "DEF", "G", "HI", "J and", " more"]] == [
        "the ABC", "", "", "", "", "",
    ]  # fmt: skip
    assert scanner.found == "DEFGHIJ"
    assert scanner.finish() == ""


def test_a_long_stop_string_does_not_hold_other_text_back() -> None:
    scanner = StopScanner(["x" * 200], include_stop=False)

    assert scanner.feed("a reply of less than two hundred letters") == "a reply of less than two hundred letters"


def test_the_stop_string_is_shown_once_on_demand() -> None:
    scanner = StopScanner(["</end>"], include_stop=True)

    assert scanner.feed("sky</e") == "sky"
    assert scanner.feed("nd> and so") == "</end>"
    assert scanner.found == "</end>"


def test_held_text_comes_out_at_the_end() -> None:
    scanner = StopScanner(["</end>"], include_stop=False)

    assert scanner.feed("sky</e") == "sky"
    assert scanner.finish() == "</e"
    assert scanner.found is None


def test_text_passed_through_is_shown_and_takes_no_part_in_a_match() -> None:
    scanner = StopScanner(["ab"], include_stop=False)

    assert scanner.pass_through("xab a") == "xab a"
    assert scanner.feed("b a") == "b "
    assert scanner.pass_through("b") == "ab"
    assert scanner.found is None


@pytest.mark.parametrize("char", list("^]-\\[&~|.*$\0\n\t "))
def test_characters_that_mean_something_in_patterns_are_plain_here(char: str) -> None:
    scanner = StopScanner([char, "]^"], include_stop=False)

    assert scanner.feed(f"ab1{char}2") == "ab1"
    assert scanner.found == char


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopScanner(["a", ""], include_stop=False)


def test_a_text_that_almost_matches_over_and_over_is_shown_but_for_what_may_still_match() -> None:
    scanner = StopScanner(["a" * 1000 + "b"], include_stop=False)

    shown = "".join([scanner.feed("a") for _ in range(20_000)])

    assert shown == "a" * 19_000
    assert scanner.feed("b") == ""
    assert scanner.found is not None
