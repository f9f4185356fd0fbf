"""Resumption: which unfinished requests the next incarnation of an engine gets at once, which one after the other, and
which never again.

Pure. Used by `EngineRequests` when an engine has died and is started again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["Resumable", "Resumption", "is_suspect"]

_SUSPICIOUS_DEATHS: Final = 2


class Resumable(Protocol):
    """What this module needs to know of a request."""

    num_tokens: int
    """Tokens delivered so far."""
    num_tokens_when_sent: int | None
    """`num_tokens` when the engine got it; None: the engine does not have it."""
    num_deaths: int
    """Engines that died while they had it and had delivered no token of it."""


RequestT = TypeVar("RequestT", bound=Resumable)


def is_suspect(request: Resumable) -> bool:
    """It may be what engines die of."""
    return request.num_deaths >= _SUSPICIOUS_DEATHS


class Resumption(Generic[RequestT]):
    """Any request may be what kills the engine. A delivered token clears it.

    A request that got no token from two incarnations is a suspect. Suspects are tried one at a time, beside all other
    requests, and the suspect that is on trial when the engine dies is given up.
    """

    def __init__(self) -> None:
        self._suspects: deque[RequestT] = deque()
        self._on_trial: RequestT | None = None

    @property
    def suspects(self) -> list[RequestT]:
        """The suspects that wait for their trial, in order of arrival."""
        return list(self._suspects)

    @property
    def on_trial(self) -> RequestT | None:
        """The suspect that the engine has. It has delivered nothing yet."""
        return self._on_trial

    def engine_lost(
        self, requests: Iterable[RequestT], *, could_run: Callable[[RequestT], bool] = lambda request: True
    ) -> RequestT | None:
        """An incarnation has died with these requests unfinished, or before it got them.

        Args:
            could_run: the engine was free to work for this request. One that it only kept, asleep or paused, is not to
                blame.

        Returns:
            The request that is to be given up, or None.
        """
        for request in requests:
            if request.num_tokens_when_sent is not None:
                if request.num_tokens > request.num_tokens_when_sent:
                    request.num_deaths = 0
                elif could_run(request):
                    request.num_deaths += 1
                request.num_tokens_when_sent = None
        suspect, self._on_trial = self._on_trial, None
        self._suspects.clear()
        return suspect if suspect is not None and could_run(suspect) else None

    def take(self, requests: Iterable[RequestT]) -> list[RequestT]:
        """An incarnation is ready for these requests, in order of arrival. Returns those to send now."""
        now = []
        for request in requests:
            if is_suspect(request):
                self._suspects.append(request)
            else:
                now.append(request)
        return now + (self._try_next() if self._on_trial is None else [])

    def finish(self, request: RequestT) -> list[RequestT]:
        """A request has got a token, or has ended in any way. Harmless if it was no suspect.

        Returns:
            The requests to send now.
        """
        if request is self._on_trial:
            return self._try_next()
        if request in self._suspects:
            self._suspects.remove(request)
        return []

    def _try_next(self) -> list[RequestT]:
        self._on_trial = self._suspects.popleft() if self._suspects else None
        return [] if self._on_trial is None else [self._on_trial]
