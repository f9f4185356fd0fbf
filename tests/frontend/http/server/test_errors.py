"""Replies for exceptions: shape, limits and headers."""

from __future__ import annotations

import json

import pytest

from trio_llm import errors
from trio_llm.errors import EngineError, InvalidRequestError, NotSupportedError, TrioLLMError
from trio_llm.frontend.http.server.errors import MAX_MESSAGE_CHARS, only_error, reply_for
from trio_llm.quoting import MAX_QUOTED_CHARS, quote

SERVER_ERRORS = [
    errors.EngineError,
    errors.EngineGenerateError,
    errors.EngineUnavailableError,
    errors.RequestTimeoutError,
    errors.EngineDeadError,
    errors.EngineStartupError,
    errors.NotSupportedError,
]


@pytest.mark.parametrize("kind", SERVER_ERRORS)
def test_every_5xx_says_whether_a_retry_can_help(kind: type[TrioLLMError]) -> None:
    reply = reply_for(kind("text"))

    headers = dict(reply.headers)
    assert json.loads(reply.body)["error"]["code"] == reply.status == kind.status
    assert (b"retry-after" in headers) == kind.can_retry
    assert (headers.get(b"x-should-retry") == b"false") == (not kind.can_retry)


def test_a_reply_to_a_request_at_fault_says_nothing_about_retries() -> None:
    assert reply_for(InvalidRequestError("bad", "n")).headers == ()


def test_a_lone_surrogate_in_a_message_or_a_field_does_not_break_the_reply() -> None:
    reply = reply_for(InvalidRequestError("bad \udc97 text", "messages.\ud800"))

    error = json.loads(reply.body)["error"]
    assert (error["message"], error["param"]) == ("bad ? text", "messages.?")


def test_a_long_message_is_cut() -> None:
    error = json.loads(reply_for(EngineError("x" * 100_000)).body)["error"]

    assert len(error["message"]) == MAX_MESSAGE_CHARS


def test_the_retry_time_is_in_whole_seconds_and_never_zero() -> None:
    error = NotSupportedError("x")
    error.retry_after_s = 0.2

    assert (b"retry-after", b"1") in reply_for(error).headers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (1.5, "1.5"),
        ("é\ud800", r"'\xe9\ud800'"),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object with 1 keys"),
        (10**100, "a number of more than 77 digits"),
        (b"x", "a bytes"),
    ],
)
def test_values_are_quoted_as_json_has_them(value: object, shown: str) -> None:
    assert quote(value) == shown


def test_a_quoted_value_is_short_even_if_python_refuses_to_print_it() -> None:
    for value in ("é" * 10**6, [1] * 10**6, 10**5000):
        assert len(quote(value)) <= MAX_QUOTED_CHARS


def test_an_error_of_this_package_is_found_in_nested_groups() -> None:
    ours = EngineError("ours")
    nested = ExceptionGroup("", [KeyError("x"), ExceptionGroup("", [ExceptionGroup("", [ours])])])

    assert only_error(nested) is ours
    assert only_error(ours) is ours
