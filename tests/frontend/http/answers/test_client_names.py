"""Errors in the client's words."""

from __future__ import annotations

import pytest

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.answers.client_names import in_client_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logprobs must be at most 20", "top_logprobs must be at most 20"),
        ("cache_salt must not be 'logprobs'; logprobs is", "cache_salt must not be 'logprobs'; top_logprobs is"),
        (r"not 'it\'s logprobs' but logprobs", r"not 'it\'s logprobs' but top_logprobs"),
        ('not "logprobs" but logprobs', 'not "logprobs" but top_logprobs'),
        ("num_logprobs stays", "num_logprobs stays"),
    ],
)
def test_names_change_and_what_the_client_sent_does_not(text: str, expected: str) -> None:
    error = in_client_names(InvalidRequestError(text, "logprobs"), {"logprobs": "top_logprobs"})

    assert (str(error), error.param) == (expected, "top_logprobs")
