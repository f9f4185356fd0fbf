"""Admission: whether one more request may wait, and the counts that decide it.

Pure. `find_overload` decides. `RequestRegistry` keeps the ledger and asks it right before it registers a request, so no
other request can come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from trio_llm.config import EngineConfig
from trio_llm.errors import InvalidRequestError, OverloadedError, QueuedTokensError, QueueFullError

__all__ = ["AdmissionLedger", "AdmissionLimits", "LoadOfOthers", "find_overload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """None: no limit."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> AdmissionLimits:
        return cls(max_num_queued_reqs=config.max_num_queued_reqs, max_num_queued_tokens=config.max_num_queued_tokens)


def find_overload(
    limits: AdmissionLimits, *, num_requests: int, num_tokens: int, count: int = 1, num_prompt_tokens: int = 0
) -> OverloadedError | None:
    """Why a request must be refused now, or None.

    Args:
        num_requests: how many are unfinished; each choice of an answer counts.
        num_tokens: prompt tokens of requests that have no first token yet.
        count: choices of the new request.
        num_prompt_tokens: prompt tokens of one choice; 0 if not known yet.

    Raises:
        InvalidRequestError: it has more choices than could ever be admitted.
    """
    max_requests, max_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
    if max_requests is not None:
        if count > max_requests:
            raise InvalidRequestError(
                f"n is {count}, but this server takes {max_requests} at a time (--max-num-queued-reqs)", "n"
            )
        if num_requests + count > max_requests:
            return QueueFullError(
                f"{num_requests} requests are unfinished and the limit of this server is {max_requests} "
                f"(--max-num-queued-reqs); this one wants {count} more, try again later"
            )
    # While no token waits, a prompt of any length is admitted: otherwise a long one never could be.
    if max_tokens is not None and num_tokens > 0 and num_tokens + max(1, count * num_prompt_tokens) > max_tokens:
        wanted = f"this one has {count * num_prompt_tokens} more, " if num_prompt_tokens else ""
        return QueuedTokensError(
            f"{num_tokens} prompt tokens wait for their first answer token and the limit of this server is "
            f"{max_tokens} (--max-num-queued-tokens); {wanted}try again later"
        )
    return None


class LoadOfOthers(Protocol):
    """What other front ends of the same engines have. The limits are for all of them together."""

    @property
    def num_requests(self) -> int:
        """Their unfinished requests."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of their requests that have no first token yet."""
        ...

    def publish(self, num_requests: int, num_tokens: int) -> None:
        """Let them know what this front end has."""
        ...


class AdmissionLedger:
    """Counts what is unfinished: from its registration until the engine has confirmed its end.

    Args:
        on_rejection: is called with the reason of each refusal.
        others: other front ends; None: there are none.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        on_rejection: Callable[[str], None] = lambda _: None,
        *,
        others: LoadOfOthers | None = None,
    ) -> None:
        self._limits = limits
        self._on_rejection = on_rejection
        self._others = others
        self._prefills: dict[Hashable, int] = {}
        """Per unfinished request: its prompt tokens until its first token has come, then 0."""
        self._num_tokens = 0
        """The sum of `_prefills`."""
        self._inputs: dict[Hashable, tuple[int, Callable[[], None]]] = {}
        """Inputs of sessions that wait to be admitted, in their order: tokens, and what to call then."""

    @property
    def num_requests(self) -> int:
        return len(self._prefills)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of requests that have no first token yet, and of inputs that wait to be admitted."""
        return self._num_tokens + sum(num_tokens for num_tokens, _ in self._inputs.values())

    def check(self, *, count: int = 1, num_prompt_tokens: int = 0) -> None:
        """Return if a request of `count` choices may be registered now. Arguments and errors: as `find_overload`.

        Raises:
            OverloadedError: it must not.
            InvalidRequestError: it never could.
        """
        others = self._others
        overload = find_overload(
            self._limits,
            num_requests=self.num_requests + (0 if others is None else others.num_requests),
            num_tokens=self.num_tokens + (0 if others is None else others.num_tokens),
            count=count,
            num_prompt_tokens=num_prompt_tokens,
        )
        if overload is not None:
            self._on_rejection(overload.reason)
            raise overload

    def add(self, request: Hashable, num_prompt_tokens: int) -> None:
        """One choice of a request was registered."""
        self.remove(request)
        self._count(request, num_prompt_tokens)
        self._publish()

    def queue_input(self, session: Hashable, num_tokens: int, on_admitted: Callable[[], None]) -> None:
        """Ask for room for an unfinished session's next input; `on_admitted` is called when there is, now or later.

        An input is never refused, since its session was admitted. Its tokens count from now on, so that new requests
        are refused and do not overtake it. Inputs are admitted in their order. The end of its session ends the wait.
        """
        self._num_tokens -= self._prefills.get(session, 0)
        self._prefills[session] = 0
        self._inputs.pop(session, None)
        self._inputs[session] = (num_tokens, on_admitted)
        self._admit_inputs()
        self._publish()

    def prefill_done(self, request: Hashable) -> None:
        """The prompt of a request is computed. Harmless if it was before, or if the request is gone."""
        if self._prefills.get(request):
            self._count(request, 0)
            self._admit_inputs()
            self._publish()

    def remove(self, request: Hashable) -> None:
        """A request is over. Harmless if it was not counted."""
        self._inputs.pop(request, None)
        self._num_tokens -= self._prefills.pop(request, 0)
        self._admit_inputs()
        self._publish()

    def check_counts(self, requests: Iterable[Hashable]) -> None:
        """Assert that exactly these unfinished requests are counted, and no input that waits is counted twice."""
        assert self._prefills.keys() == set(requests), "other requests are counted than are unfinished"
        assert self._num_tokens == sum(self._prefills.values())
        assert self._inputs.keys() <= self._prefills.keys(), "an input of a session that is over waits"
        assert all(self._prefills[session] == 0 for session in self._inputs), "an input that waits is counted twice"

    def _count(self, request: Hashable, num_tokens: int) -> None:
        self._num_tokens += num_tokens - self._prefills.get(request, 0)
        self._prefills[request] = num_tokens

    def _publish(self) -> None:
        if self._others is not None:
            self._others.publish(self.num_requests, self.num_tokens)

    def _admit_inputs(self) -> None:
        limit = self._limits.max_num_queued_tokens
        while self._inputs:
            session, (num_tokens, on_admitted) = next(iter(self._inputs.items()))
            if limit is not None and self._num_tokens > 0 and self._num_tokens + num_tokens > limit:
                return
            del self._inputs[session]
            self._count(session, num_tokens)
            on_admitted()
