"""`fresh`: copies of an error for several tasks. The replies made of errors are tested with the HTTP server."""

from __future__ import annotations

import traceback

import pytest

from trio_llm import errors
from trio_llm.errors import (
    EngineDeadError,
    EngineStartupError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TrioLLMError,
    fresh,
)

EXAMPLES = [
    EngineDeadError("gone"),
    EngineUnavailableError("loading", retry_after_s=2.5),
    QueueFullError("8 of 8", retry_after_s=9.0),
    InvalidRequestError("bad", "prompt"),
    PromptTooLongError(limit=10, num_prompt_tokens=11, max_tokens=3),
    errors.BodyTooLargeError(7),
    errors.ModelNotFoundError("a", ("b",)),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_copy_says_all_that_the_error_says(error: TrioLLMError) -> None:
    copy = fresh(error)

    assert copy is not error
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


def test_raising_copies_leaves_the_traceback_of_the_error_as_it_was() -> None:
    error = EngineDeadError("gone")

    for _ in range(3):
        with pytest.raises(EngineDeadError) as caught:
            raise fresh(error)
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 1

    assert error.__traceback__ is None


def test_a_copy_has_the_cause_of_the_error() -> None:
    cause = OSError("no memory")
    try:
        raise EngineStartupError("cannot start") from cause
    except EngineStartupError as error:
        copy = fresh(error)

    assert copy.__cause__ is cause
    assert copy.__traceback__ is None


def test_a_copy_without_a_cause_shows_the_context_in_which_it_is_raised() -> None:
    assert not fresh(EngineDeadError("gone")).__suppress_context__
