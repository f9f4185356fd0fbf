"""Resumption: which unfinished requests the next engine gets at once, which one after the other, and which no more.

Pure. Used by `RequestRegistry` when an engine has died and another one is started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["Resumable", "Resumption"]

_SUSPICIOUS_DEATHS: Final = 2


class Resumable(Protocol):
    """A request as far as this module knows it."""

    num_tokens: int
    """Delivered so far."""
    num_tokens_when_sent: int | None
    """As many when the engine got it; None: the engine does not have it."""
    num_deaths: int
    """Of engines that had it and delivered no token of it."""


RequestT = TypeVar("RequestT", bound=Resumable)


class Resumption(Generic[RequestT]):
    """A request may be what kills the engines. A token that is delivered clears it.

    Those that got none from two engines are tried one at a time, beside all the others, and the one that is on trial
    when an engine dies is given up.
    """

    def __init__(self) -> None:
        self._suspects: deque[RequestT] = deque()
        self._on_trial: RequestT | None = None

    @property
    def on_trial(self) -> RequestT | None:
        """The suspect that the engine has; it has delivered nothing yet."""
        return self._on_trial

    def engine_lost(
        self, requests: Iterable[RequestT], *, could_run: Callable[[RequestT], bool] = lambda request: True
    ) -> RequestT | None:
        """An engine has died with these requests unfinished, or before it got them.

        Args:
            could_run: the engine was free to work for this one. What it only keeps, as in its sleep, is not to blame.

        Returns:
            The one that is to be given up.
        """
        for request in requests:
            if request.num_tokens_when_sent is not None:
                if request.num_tokens > request.num_tokens_when_sent:
                    request.num_deaths = 0
                elif could_run(request):
                    request.num_deaths += 1
                request.num_tokens_when_sent = None
        culprit, self._on_trial = self._on_trial, None
        self._suspects.clear()
        return culprit if culprit is not None and could_run(culprit) else None

    def engine_ready(self, requests: Iterable[RequestT]) -> list[RequestT]:
        """Another engine is there for these unfinished requests, in order of arrival. Returns those to send now."""
        now = []
        for request in requests:
            if request.num_deaths < _SUSPICIOUS_DEATHS:
                now.append(request)
            else:
                self._suspects.append(request)
        return now + self._try_next()

    def is_over(self, request: RequestT) -> list[RequestT]:
        """A request has got a token, or has ended in whatever way. Harmless if it was no suspect.

        Returns:
            What is to be sent now.
        """
        if request is self._on_trial:
            return self._try_next()
        if request in self._suspects:
            self._suspects.remove(request)
        return []

    def _try_next(self) -> list[RequestT]:
        self._on_trial = self._suspects.popleft() if self._suspects else None
        return [] if self._on_trial is None else [self._on_trial]
