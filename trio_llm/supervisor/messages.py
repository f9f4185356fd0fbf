"""The messages between the supervisor and its front ends, as msgspec structs.

Pure. They go over a socket pair that only these two processes have, each with its length in front.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import CodecError
from trio_llm.frontend.control.engine_control import Answer
from trio_llm.frontend.control.state import ControlState
from trio_llm.frontend.statistics.metric_counts import MetricsSnapshot
from trio_llm.wire.messages import PlainValue, Progress

__all__ = [
    "LENGTH_BYTES",
    "MAX_MESSAGE_BYTES",
    "AskMetrics",
    "Boot",
    "ControlAnswer",
    "ControlCall",
    "EngineAddresses",
    "EngineDied",
    "EngineLostNotice",
    "EngineProgress",
    "EngineStates",
    "ErrorKind",
    "FromFrontEnd",
    "KillEngine",
    "Listening",
    "Metrics",
    "MetricsOfOthers",
    "ReportMetrics",
    "Serving",
    "Stop",
    "ToFrontEnd",
    "decode_from_front_end",
    "decode_to_front_end",
    "encode",
]

LENGTH_BYTES: Final = 4
"""Each message's length comes first, as an unsigned big-endian integer of this size."""
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024


ErrorKind = Literal["failed", "invalid", "unsupported", "unavailable", "dead"]


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base: plain data with the tag among the fields."""


# ---------------------------------------------------------------------------------- to the front end


class Boot(_Message, frozen=True, tag="boot"):
    """The first message: who the front end is, and what it serves."""

    engine: EngineConfig
    server: ServerConfig
    num_engines: int
    client_index: int
    """Its place among the clients of the engines, from 1: 0 is the supervisor."""
    listener_fds: list[int]
    """Descriptors of the sockets that listen, which all front ends share."""
    load_fd: int
    """Descriptor of the table of `SharedLoad`; the place of this front end is `client_index - 1`."""
    log_level: str
    is_restarted: bool = False
    """Another incarnation ran before, and other front ends may answer clients meanwhile."""


class EngineProgress(_Message, frozen=True, tag="progress"):
    """An engine is loading, and has come so far."""

    engine_index: int
    progress: Progress


class EngineLostNotice(_Message, frozen=True, tag="lost"):
    """An incarnation of an engine is dead, and another one will be started."""

    engine_index: int
    epoch: int
    reason: str


class EngineDied(_Message, frozen=True, tag="died"):
    """An engine is dead for good."""

    engine_index: int
    reason: str


class EngineStates(_Message, frozen=True, tag="states"):
    """What control calls have made of the engines, each time that one begins or ends."""

    states: list[ControlState]
    """By the index of the engine."""
    num_calls: int
    """Calls under way, that may keep the engines' loops for as long as a start takes."""


class ControlAnswer(_Message, frozen=True, tag="answer"):
    """The end of a control call: answers of the engines, or an error."""

    call_id: int
    answers: list[Answer] = []
    error: str | None = None
    kind: ErrorKind = "failed"
    """Which error it is."""
    param: str | None = None
    """The argument that is at fault, for `invalid`."""


class ReportMetrics(_Message, frozen=True, tag="report_metrics"):
    """Send `Metrics` with this number."""

    call_id: int


class MetricsOfOthers(_Message, frozen=True, tag="metrics_of_others"):
    """The answer to `AskMetrics`: what other front ends have counted, those among them that have died."""

    call_id: int
    snapshots: list[MetricsSnapshot]


class Stop(_Message, frozen=True, tag="stop"):
    """Drain, then end."""


ToFrontEnd = (
    Boot
    | EngineProgress
    | EngineLostNotice
    | EngineDied
    | EngineStates
    | ControlAnswer
    | ReportMetrics
    | MetricsOfOthers
    | Stop
)


# -------------------------------------------------------------------------------- from the front end


class EngineAddresses(_Message, frozen=True):
    """Where a front end listens for one engine."""

    input_address: str
    output_address: str


class Listening(_Message, frozen=True, tag="listening"):
    """The sockets for the engines are bound: they may connect."""

    addresses: list[EngineAddresses]
    """By the index of the engine."""


class Serving(_Message, frozen=True, tag="serving"):
    """The model is loaded, and HTTP clients are answered."""


class KillEngine(_Message, frozen=True, tag="kill"):
    """This incarnation is at fault in a way that it cannot know."""

    engine_index: int
    epoch: int
    reason: str


class ControlCall(_Message, frozen=True, tag="call"):
    """Make a call that changes the engines."""

    call_id: int
    method: str
    args: list[PlainValue]


class Metrics(_Message, frozen=True, tag="metrics"):
    """What this front end has counted. Sent every few seconds, and when the supervisor asks."""

    call_id: int
    """That of `ReportMetrics`; 0: it was not asked for."""
    snapshot: MetricsSnapshot


class AskMetrics(_Message, frozen=True, tag="ask_metrics"):
    """Send `MetricsOfOthers` with this number."""

    call_id: int


FromFrontEnd = Listening | Serving | KillEngine | ControlCall | Metrics | AskMetrics


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd)
_from_front_end = msgspec.msgpack.Decoder(FromFrontEnd)


def encode(message: ToFrontEnd | FromFrontEnd) -> bytes:
    """The bytes of one message, its length in front.

    Raises:
        CodecError: it has no form as bytes, or is too long.
    """
    try:
        document = _encoder.encode(message)
    except (msgspec.MsgspecError, OverflowError, ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"a message for another process cannot be encoded: {error}") from error
    if len(document) > MAX_MESSAGE_BYTES:
        raise CodecError(f"a message of {len(document)} bytes is longer than the limit of {MAX_MESSAGE_BYTES}")
    return len(document).to_bytes(LENGTH_BYTES, "big") + document


def decode_to_front_end(document: bytes) -> ToFrontEnd:
    """A message for a front end, without its length.

    Raises:
        CodecError: it is none.
    """
    return _decode(_to_front_end, document)


def decode_from_front_end(document: bytes) -> FromFrontEnd:
    """A message for the supervisor, without its length. Raises as `decode_to_front_end`."""
    return _decode(_from_front_end, document)


def _decode(decoder: msgspec.msgpack.Decoder[_T], document: bytes) -> _T:
    try:
        return decoder.decode(document)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CodecError(f"not a message between supervisor and front end: {error}") from error
