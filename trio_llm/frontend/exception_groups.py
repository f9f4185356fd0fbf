"""Exception groups end at the public edge: if a nursery wrapped a single exception, the caller gets that exception.

So `except EngineDeadError` works for a caller, however many nurseries were between. An error of a caller's own code is
kept apart from a cancellation that passes through it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

__all__ = ["errors_to", "single_leaf", "unwrap_single"]

_NURSERY_MESSAGE: Final = "Exceptions from Trio nursery"
"""The message that Trio gives the groups of its nurseries."""


def single_leaf(error: BaseException) -> BaseException | None:
    """The only exception in a group, however deep; cancellations beside it do not count. None: there are several."""
    if not _is_of_a_nursery(error):
        return error
    assert isinstance(error, BaseExceptionGroup)
    leaves = list(_leaves(error))
    causes = [leaf for leaf in leaves if not isinstance(leaf, trio.Cancelled)]
    if len(causes) == 1:
        return causes[0]
    return leaves[0] if len(leaves) == 1 else None


@contextmanager
def unwrap_single() -> Iterator[None]:
    """Let a group of one exception leave this block as that exception."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaf = single_leaf(group)
        if leaf is None:
            raise
        cause, context, is_hidden = leaf.__cause__, leaf.__context__, leaf.__suppress_context__
        try:
            raise leaf
        finally:
            # `raise` has put the group in place of what the leaf was raised from; the group says nothing more.
            leaf.__cause__, leaf.__context__, leaf.__suppress_context__ = cause, context, is_hidden


@contextmanager
def errors_to(take: Callable[[Exception], None]) -> Iterator[None]:
    """Give an error of this block to `take`, also if it comes beside a cancellation, which is raised.

    For code of the caller's, which may fail in its clean-up.
    """
    try:
        yield
    except Exception as error:
        take(error)
    except BaseExceptionGroup as group:
        errors, others = group.split(Exception)
        if errors is not None:
            take(errors)
        assert others is not None
        raise others from None


def _is_of_a_nursery(error: BaseException) -> bool:
    """Trio made it. Groups that were raised on purpose stay what they are."""
    return isinstance(error, BaseExceptionGroup) and error.message == _NURSERY_MESSAGE


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup) and _is_of_a_nursery(error):
            yield from _leaves(error)
        else:
            yield error
