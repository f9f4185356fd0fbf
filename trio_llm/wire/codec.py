"""Messages to msgpack frames and back.

Pure. A frame is data from outside: whatever is wrong with it, the only exception is `CodecError`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from trio_llm.errors import CodecError
from trio_llm.wire.messages import FromEngine, ToEngine

__all__ = ["MAX_FRAME_BYTES", "decode_from_engine", "decode_to_engine", "encode"]

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Larger frames are refused unread. A prompt of a million tokens takes about 5 MB."""

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

# What msgspec raises for malformed input, beside its own errors: deep nesting, lone surrogates, huge integers.
_REFUSALS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The frame of a message.

    Raises:
        CodecError: a value has no form on the wire (an integer over 64 bits, a lone surrogate), or the
            frame would be larger than `MAX_FRAME_BYTES`.
    """
    try:
        frame = _encoder.encode(message)
    except _REFUSALS as error:
        raise CodecError(f"cannot encode {type(message).__name__}: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"{type(message).__name__} takes {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    return frame


def decode_to_engine(frame: bytes) -> ToEngine:
    """The message in a frame that a front end sent.

    Raises:
        CodecError: it holds none.
    """
    return _decode(_to_engine, frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """The message in a frame that an engine sent.

    Raises:
        CodecError: it holds none.
    """
    return _decode(_from_engine, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"a frame of {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except _REFUSALS as error:
        raise CodecError(f"malformed frame of {len(frame)} bytes: {error}") from error
