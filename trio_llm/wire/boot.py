"""EngineBoot: what an engine process reads from its pipe before anything else.

Pure. One length-prefixed msgpack document; the pipe then stays open, and its end is the order to stop.
"""

from __future__ import annotations

from typing import Final

import msgspec

from trio_llm.config import EngineConfig
from trio_llm.errors import CodecError

__all__ = ["LENGTH_BYTES", "EngineBoot", "decode_boot", "encode_boot", "engine_identity"]

LENGTH_BYTES: Final = 4
"""The document's length comes first, as an unsigned big-endian integer of this size."""


class EngineBoot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the engine is, what it runs and where its front end listens."""

    config: EngineConfig
    engine_index: int
    epoch: int
    """Count of this engine's incarnations, from 1; goes into every message it sends."""
    input_address: str
    """The front end's ROUTER: what the engine reads."""
    output_address: str
    """The front end's PULL: what the engine writes."""


def engine_identity(engine_index: int, epoch: int) -> bytes:
    """The six bytes by which a front end's ROUTER knows an incarnation of an engine."""
    return engine_index.to_bytes(2, "little") + epoch.to_bytes(4, "little")


def encode_boot(boot: EngineBoot) -> bytes:
    """The bytes for the pipe, length prefix included.

    Raises:
        CodecError: a value has no form on the wire.
    """
    try:
        document = msgspec.msgpack.encode(boot)
    except (msgspec.MsgspecError, OverflowError, ValueError, TypeError) as error:
        raise CodecError(f"the configuration cannot be sent to an engine: {error}") from error
    return len(document).to_bytes(LENGTH_BYTES, "big") + document


def decode_boot(document: bytes) -> EngineBoot:
    """The boot in a document (without its length prefix).

    Raises:
        CodecError: it holds none.
    """
    try:
        return msgspec.msgpack.decode(document, type=EngineBoot)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CodecError(f"not an engine's boot document: {error}") from error
