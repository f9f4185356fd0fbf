"""The reader of server-sent events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.cli.sse import EventParser


def parse(*pieces: bytes) -> list[str]:
    parser = EventParser()
    return [data for piece in pieces for data in parser.feed(piece)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_each_kind_of_line_end_ends_a_line(end: bytes) -> None:
    assert parse(end.join([b"data: one", b"", b"data: two", b"", b""])) == ["one", "two"]


def test_comments_and_other_fields_are_skipped() -> None:
    assert parse(b": keep-alive\n\nevent: x\nid: 7\ndata: one\n\nretry: 5\n\n") == ["one"]


def test_lines_of_data_are_joined() -> None:
    assert parse(b"data: one\ndata:two\ndata\n\n") == ["one\ntwo\n"]


def test_only_one_blank_is_taken_off() -> None:
    assert parse(b"data:  indented: yes \n\n") == [" indented: yes "]


def test_an_event_that_the_end_cuts_off_is_dropped() -> None:
    assert parse(b"data: one\n\ndata: two\n") == ["one"]


@given(
    events=st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5
    ),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=8),
)
def test_how_the_body_is_cut_does_not_change_the_events(events: list[str], end: str, cuts: list[int]) -> None:
    body = "".join(f": note{end}data: {data}{end}{end}" for data in events).encode()
    places = [0, *sorted(cuts), len(body)]

    assert parse(*[body[a:b] for a, b in pairwise(places)]) == events
