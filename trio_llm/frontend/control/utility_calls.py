"""UtilityCalls: calls into an engine's method table that wait for their answer.

Owned by `Engine`. A call outlives an incarnation: the next one gets it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Protocol

import trio

from trio_llm.errors import (
    CodecError,
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    NotSupportedError,
    fresh,
)
from trio_llm.wire.codec import decode_to_engine, encode
from trio_llm.wire.messages import PlainValue, ToEngine, UtilityCall, UtilityResult, UtilityValue

__all__ = ["EngineLink", "UtilityCalls"]

_Answer = UtilityResult | EngineDeadError | EngineGenerateError | EngineUnavailableError


class EngineLink(Protocol):
    """The way to an engine."""

    @property
    def is_up(self) -> bool:
        """False: the engine is dead, and no other one has followed yet."""
        ...

    def send_nowait(self, message: ToEngine) -> None:
        """Queue one message. Raises CodecError if it has no form on the wire."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call without an answer; `max_deaths` as in `UtilityCalls.call`."""

    call: UtilityCall
    send: trio.MemorySendChannel[_Answer]
    max_deaths: int | None
    is_sent: bool = False
    """To the present incarnation."""
    num_deaths: int = 0


def _error_of(answer: UtilityResult, text: str) -> Exception:
    match answer.error_kind:
        case "invalid":
            return InvalidRequestError(text, answer.error_param)
        case "unsupported":
            return NotSupportedError(text)
        case _:
            return EngineGenerateError(text)


def _error_of_deaths(waiting: _Waiting, reason: str) -> EngineGenerateError | EngineUnavailableError:
    if waiting.max_deaths == 1:
        return EngineUnavailableError(f"the engine died before it answered, and is started again: {reason}")
    return EngineGenerateError(
        f"{waiting.call.method}: engines die of this call: {waiting.num_deaths} did before they answered: {reason}"
    )


def _check_has_form(call: UtilityCall) -> None:
    """Checked at once, also while there is no engine, so that the caller gets the error. A message that the engine
    cannot read is dropped there and never answered."""
    try:
        decode_to_engine(encode(call))
    except CodecError as error:
        raise InvalidRequestError(f"{call.method[:100]!r} cannot be sent to the engine: {error}") from error


class UtilityCalls:
    """Numbers calls and gives each its own answer."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._dead_error: EngineDeadError | None = None

    async def call(
        self,
        method: str,
        *args: PlainValue,
        kwargs: Mapping[str, PlainValue] = MappingProxyType({}),
        max_deaths: int | None = None,
    ) -> UtilityValue:
        """Call a method of the engine and wait for its answer.

        If the engine dies meanwhile and another one is started, the call is made again there.

        Args:
            kwargs: arguments by name.
            max_deaths: incarnations that may die before one answers. 1: the call is about this incarnation, and is not
                made again; more: the call may be what they die of.

        Cancellation: the engine may still carry the call out; its answer is dropped.

        Raises:
            EngineGenerateError: the method failed, or there is none of that name; or `max_deaths` engines died.
            EngineUnavailableError: the engine died, and `max_deaths` is 1.
            InvalidRequestError: the arguments are at fault, or have no form on the wire; the engine has changed
                nothing.
            NotSupportedError: this engine cannot do that.
            EngineDeadError: the engine is gone, or went while this waited.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._dead_error is not None:
            raise fresh(self._dead_error)
        call = UtilityCall(next(self._numbers), method, list(args), dict(kwargs))
        _check_has_form(call)
        send, receive = trio.open_memory_channel[_Answer](1)
        waiting = _Waiting(call, send, max_deaths)
        self._waiting[call.call_id] = waiting
        try:
            if self._engine.is_up:
                self._send(waiting)
            answer = await receive.receive()
        finally:
            self._waiting.pop(call.call_id, None)
        if not isinstance(answer, UtilityResult):
            raise fresh(answer)
        if answer.error is not None:
            raise _error_of(answer, f"{method}: {answer.error}")
        return answer.value

    def resolve(self, result: UtilityResult) -> None:
        """Give an answer to its caller, if that one still waits."""
        if waiting := self._waiting.pop(result.call_id, None):
            waiting.send.send_nowait(result)

    def on_engine_lost(self, reason: str) -> None:
        """The engine is dead, and there will be another one: calls wait for it, except for one that engines die of."""
        for call_id, waiting in list(self._waiting.items()):
            waiting.num_deaths += waiting.is_sent
            waiting.is_sent = False
            if waiting.max_deaths is not None and waiting.num_deaths >= waiting.max_deaths:
                del self._waiting[call_id]
                waiting.send.send_nowait(_error_of_deaths(waiting, reason))

    def resend(self) -> None:
        """Another engine is ready: it gets all calls that wait."""
        for waiting in self._waiting.values():
            self._send(waiting)

    def fail_all(self, error: EngineDeadError) -> None:
        """The engine is gone: every call, now and later, raises this."""
        self._dead_error = error
        for waiting in self._waiting.values():
            waiting.send.send_nowait(error)
        self._waiting.clear()

    def _send(self, waiting: _Waiting) -> None:
        self._engine.send_nowait(waiting.call)
        waiting.is_sent = True
