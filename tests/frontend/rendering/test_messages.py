"""Messages: one plain form whatever the caller gave, and refusals that name the place."""

from __future__ import annotations

from typing import Any

import pytest

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.rendering.messages import MAX_MESSAGES, MAX_PARTS, plain_messages

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_text_parts_become_lines_in_every_role(role: str) -> None:
    plain = plain_messages([{"role": role, "content": [text("a "), "b", text("c")], "name": "n"}])

    assert plain == [{"role": role, "content": "a \nb\nc", "name": "n"}]


@pytest.mark.parametrize("extra", [{}, {"tool_calls": None}, {"tool_calls": []}, {"content": None}, {"audio": None}])
def test_an_assistant_may_have_said_nothing(extra: dict[str, Any]) -> None:
    assert plain_messages([HELLO, {"role": "assistant", **extra}])[1] == {"role": "assistant", "content": ""}


def test_what_templates_do_not_know_is_left_out_and_text_fields_stay() -> None:
    known = {"role": "assistant", "content": "x", "reasoning_content": "y", "name": "n", "tool_call_id": "1"}

    assert plain_messages([{**known, "weight": 1, "refusal": None}]) == [known]


def test_the_callers_messages_are_left_alone() -> None:
    messages = ({"role": "user", "content": [text("a")]},)

    plain_messages(messages)[0]["role"] = "changed"

    assert messages == ({"role": "user", "content": [text("a")]},)


def test_as_many_messages_and_parts_as_allowed_are_taken() -> None:
    assert len(plain_messages([HELLO] * MAX_MESSAGES)) == MAX_MESSAGES
    assert plain_messages([{"role": "user", "content": [text("")] * MAX_PARTS}])[0]["content"].count("\n") == 1023


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        ("hello", "messages"),
        ([HELLO] * (MAX_MESSAGES + 1), "messages"),
        ([1] * (MAX_MESSAGES + 1), "messages"),
        (["hello"], "messages.0"),
        ([HELLO, {"content": "x"}], "messages.1.role"),
        ([{"role": 1, "content": "x"}], "messages.0.role"),
        ([{"role": ["user"], "content": "x"}], "messages.0.role"),
        ([{"role": "nobody", "content": "x"}], "messages.0.role"),
        ([HELLO, {"role": "user"}], "messages.1.content"),
        ([HELLO, {"role": "user", "content": None}], "messages.1.content"),
        ([HELLO, {"role": "user", "content": 5}], "messages.1.content"),
        ([{"role": "user", "content": ["a"] * (MAX_PARTS + 1)}], "messages.0.content"),
        ([{"role": "user", "content": [text("a"), 1]}], "messages.0.content.1"),
        ([{"role": "user", "content": [text("a"), {"type": "image_url"}]}], "messages.0.content.1.type"),
        ([{"role": "user", "content": [{"type": ["\udc97"]}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": "\udc97"}], "messages.0.content"),
        ([{"role": "user", "content": ["x", "\udc97"]}], "messages.0.content.1"),
        ([{"role": "user", "content": [text("\ud83d")]}], "messages.0.content.0.text"),
        ([{**HELLO, "name": "\udc97"}], "messages.0.name"),
        ([{**HELLO, "reasoning_content": ["x"]}], "messages.0.reasoning_content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages.0.tool_calls"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages.0.function_call"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plain_messages(messages)

    assert caught.value.param == param
    assert len(str(caught.value)) < 500
    str(caught.value).encode()  # the error must be valid text, too
