"""Exception groups end at the public edge, and nothing that an error says is lost there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import trio

from trio_llm.frontend.exception_groups import single_leaf, unwrap_single

NURSERY = "Exceptions from Trio nursery"


def raise_unwrapped(error: BaseException) -> None:
    with unwrap_single():
        raise error


async def the_cancelled() -> trio.Cancelled:
    """A real one: it cannot be made by hand."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            return cancelled
    raise AssertionError("it was not cancelled")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda e: e,
        lambda e: BaseExceptionGroup(NURSERY, [e]),
        lambda e: BaseExceptionGroup(NURSERY, [BaseExceptionGroup(NURSERY, [BaseExceptionGroup(NURSERY, [e])])]),
    ],
    ids=["bare", "group", "nested"],
)
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_one_error_comes_out_as_itself(
    kind: type[BaseException], wrap: Callable[[BaseException], BaseException]
) -> None:
    error = kind("mine")

    with pytest.raises(kind) as raised:
        raise_unwrapped(wrap(error))

    assert raised.value is error


def test_two_errors_stay_the_group_they_are() -> None:
    group = ExceptionGroup(NURSERY, [KeyError("a"), ExceptionGroup(NURSERY, [ValueError("b")])])

    with pytest.raises(ExceptionGroup) as raised:
        raise_unwrapped(group)

    assert raised.value is group
    assert single_leaf(group) is None


async def test_a_cancellation_beside_an_error_is_left_aside() -> None:
    cancelled = await the_cancelled()
    error = KeyError("mine")

    with pytest.raises(KeyError) as raised:
        raise_unwrapped(BaseExceptionGroup(NURSERY, [cancelled, BaseExceptionGroup(NURSERY, [error]), cancelled]))

    assert raised.value is error


async def test_a_cancellation_alone_stays_one_and_two_errors_beside_it_stay_a_group() -> None:
    cancelled = await the_cancelled()

    assert single_leaf(BaseExceptionGroup(NURSERY, [cancelled])) is cancelled
    assert single_leaf(BaseExceptionGroup(NURSERY, [cancelled, KeyError(), ValueError()])) is None


async def test_the_scope_that_was_cancelled_still_catches_what_came_through() -> None:
    with trio.CancelScope() as scope, unwrap_single():
        async with trio.open_nursery(), trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            await trio.sleep_forever()

    assert scope.cancelled_caught


def _explicitly() -> NoReturn:
    raise KeyError("mine") from ValueError("the reason")


def _implicitly() -> NoReturn:
    try:
        raise ValueError("the reason")
    except ValueError:
        raise KeyError("mine")  # noqa: B904 - that is the point


def _hidden() -> NoReturn:
    try:
        raise ValueError("the reason")
    except ValueError:
        raise KeyError("mine") from None


@pytest.mark.parametrize("fail", [_explicitly, _implicitly, _hidden])
async def test_what_an_error_was_raised_from_is_kept(fail: Callable[[], NoReturn]) -> None:
    def three(error: BaseException) -> tuple[str, str, bool]:
        return repr(error.__cause__), repr(error.__context__), error.__suppress_context__

    with pytest.raises(KeyError) as alone:
        fail()

    with pytest.raises(KeyError) as unwrapped, unwrap_single():
        async with trio.open_nursery():
            fail()

    assert three(unwrapped.value) == three(alone.value)


def test_a_group_that_was_raised_on_purpose_stays_a_group() -> None:
    mine = ExceptionGroup("mine", [ValueError("x")])

    async def main() -> None:
        with unwrap_single():
            async with trio.open_nursery():
                raise mine

    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main)

    assert caught.value.message == "mine"
    assert [str(error) for error in caught.value.exceptions] == ["x"]
