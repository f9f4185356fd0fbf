"""EngineRouter: gives requests to engines. RequestRecovery: what becomes of the requests of an engine that dies.

Used by `RequestRegistry`, which has one of each. Synchronous. The choice of an engine is `Balancer`'s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import trio

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.requests.balancing import ANYWHERE, Balancer, EngineLoad, Routing
from trio_llm.frontend.requests.collector import RequestOutputCollector
from trio_llm.frontend.requests.engine_requests import EngineLink, EngineRequests, make_blame
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.resumption import is_suspect
from trio_llm.outputs import FinishReason

__all__ = ["EngineRouter", "RequestRecovery", "Requests"]

logger = logging.getLogger(__name__)

_RECOUNT_S: Final = 0.05
"""How old the count of answers' tokens may be. What begins, ends or gets its first token is counted at once; to count
each token, too, would cost more than a few steps of error are worth."""


class EngineRouter:
    """Keeps count of the work of each engine, and moves requests between engines.

    Args:
        engines: at least one, by index.
        in_flight: the registry's requests.
    """

    def __init__(
        self, engines: Sequence[EngineRequests], balancer: Balancer, in_flight: Mapping[str, InFlightRequest]
    ) -> None:
        self._engines = engines
        self._balancer = balancer
        self._in_flight = in_flight
        self._counted_s = -math.inf
        """When all work was counted last; Trio's clock."""

    def check_routing(self, routing: Routing) -> None:
        """Raises as `Balancer.check`."""
        self._balancer.check(routing)

    def choose(self, routing: Routing, prompt_token_ids: Sequence[int], cache_salt: str | None) -> int:
        """The index of the engine for a request. Arguments and errors: as `Balancer.choose`."""
        if len(self._engines) == 1:
            return 0
        now_s = trio.current_time()
        if now_s - self._counted_s >= _RECOUNT_S:
            self._counted_s = now_s
            for request in self._in_flight.values():
                self._engines[request.engine_index].count_work(request)
        return self._balancer.choose(self._loads(), routing, prompt_token_ids, cache_salt)

    def lose(self, index: int) -> None:
        """An incarnation of an engine is dead, and no engine has its requests: they move to one that is up.

        Three kinds wait for the next incarnation, if there will be one: those that asked for this rank; those that
        engines may die of, since they would take another one with them; and all, if no engine is up.
        """
        if len(self._engines) > 1:
            self._balancer.forget(index)
            self._move_from(self._engines[index])

    def gain(self, index: int) -> None:
        """An incarnation of an engine is ready: it gets its own requests, and those that wait for engines which are not
        up go to those that are."""
        self._engines[index].on_ready()
        for engine in self._engines:
            if not engine.link.is_up and engine.num_in_flight:
                self._move_from(engine)

    def _move_from(self, source: EngineRequests) -> None:
        if not source.link.is_dead and not any(engine.link.is_up for engine in self._engines):
            return
        moved: dict[int, list[InFlightRequest]] = {}
        for choices in self._answers_of(source):
            if source.link.is_dead or not _must_stay(choices):
                index = self._choose_again(choices[0])
                for request in choices:
                    source.remove(request)
                    request.engine_index = index
                    self._engines[index].add(request)
                moved.setdefault(index, []).extend(choices)
        for index, requests in moved.items():
            self._engines[index].take_over(requests)

    def _choose_again(self, request: InFlightRequest) -> int:
        """An engine for a request whose own one is not up. Prompts of the others are in no cache, and so is its own."""
        session_id, message = request.routing.session_id, request.state.request
        routing = ANYWHERE if session_id is None else Routing(session_id=session_id)
        return self._balancer.choose(self._loads(), routing, message.prompt_token_ids, message.cache_salt)

    def _answers_of(self, engine: EngineRequests) -> list[list[InFlightRequest]]:
        """The engine's requests in order of arrival, the choices of an answer together."""
        answers: dict[RequestOutputCollector, list[InFlightRequest]] = {}
        for request in engine:
            answers.setdefault(request.collector, []).append(request)
        return list(answers.values())

    def _loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(
                is_up=engine.link.is_up,
                is_dead=engine.link.is_dead,
                own_work=engine.work,
                others_work=engine.others_work,
            )
            for engine in self._engines
        ]

    def check(self) -> None:
        """Assert that what can be computed does not wait for an engine that is not up."""
        if not any(engine.link.is_up for engine in self._engines):
            return
        for engine in self._engines:
            if not engine.link.is_up:
                for choices in self._answers_of(engine):
                    assert _must_stay(choices), f"{choices[0].state.request_id} waits, and an engine is up"


def _must_stay(choices: Sequence[InFlightRequest]) -> bool:
    return choices[0].routing.data_parallel_rank is not None or any(
        is_suspect(request.state) and request.state.status is RequestStatus.UNSENT for request in choices
    )


class Requests(Protocol):
    """The registry, as far as the recovery needs it."""

    def drop(self, request: InFlightRequest) -> None:
        """Forget a request that no row will come for."""
        ...

    def drop_all(self, engine: EngineLink, error: EngineDeadError) -> None:
        """Forget all requests of an engine; their readers get the error."""
        ...

    def mark_family_aborted(self, state: RequestState, *, reason: FinishReason = "abort") -> list[RequestState]:
        """All choices of an answer are over for their reader. Returns those that an engine has."""
        ...

    def end_in_engine(self, states: Iterable[RequestState]) -> None:
        """Let the engines forget these."""
        ...


class RequestRecovery:
    """What the lives of engines mean for their requests. An `EngineListener`."""

    def __init__(self, engines: Sequence[EngineRequests], router: EngineRouter, requests: Requests) -> None:
        self._engines = engines
        self._router = router
        self._requests = requests

    def on_lost(self, engine: EngineLink, reason: str) -> None:
        """An incarnation is dead: its unfinished requests go on with an engine that is up, or wait for the next one."""
        self._take_back(self._engines[engine.index], reason)
        self._router.lose(engine.index)

    def on_ready(self, engine: EngineLink) -> None:
        """An incarnation is ready: it gets what is unfinished and waits for it."""
        self._router.gain(engine.index)

    def on_dead(self, engine: EngineLink, error: EngineDeadError) -> None:
        """An engine is gone: its requests go on with another one. After the last one, each reader gets the text it is
        owed, then the error."""
        if all(other.link.is_dead for other in self._engines):
            self._engines[engine.index].on_lost()
            self._requests.drop_all(engine, error)
            return
        self._take_back(self._engines[engine.index], str(error))
        self._router.lose(engine.index)

    def _take_back(self, engine: EngineRequests, reason: str) -> None:
        """No engine has this engine's requests any more."""
        suspect = engine.on_lost()
        for request in [request for request in engine if request.state.status is RequestStatus.ABORTING]:
            self._requests.drop(request)
        if suspect is not None and suspect.is_unfinished:
            error = make_blame(suspect, reason)
            logger.error("request %s is given up: %s", suspect.state.external_id, error)
            suspect.collector.put_error(error)
            self._requests.end_in_engine(self._requests.mark_family_aborted(suspect.state, reason="error"))
