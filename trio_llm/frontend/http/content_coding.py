"""Content codings of bodies: gzip and deflate, read up to a limit.

Pure. Used by the request reader, in a worker thread. Decoding stops at the limit, so that a small body cannot become
a large one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from trio_llm.errors import BodyTooLargeError, InvalidRequestError
from trio_llm.quoting import quote

__all__ = ["MAX_MEMBERS", "ContentCodingError", "decode_content", "find_coding"]

MAX_MEMBERS: Final = 1024
"""Of a gzip body. Each costs a decoder, however little is in it."""

_NAMES: Final = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_PIECE_BYTES: Final = 64 * 1024


class ContentCodingError(InvalidRequestError):
    """The body comes in a content coding that this server does not read."""

    status = 415


def find_coding(headers: Sequence[str]) -> str | None:
    """The coding that all `content-encoding` headers of a request name. None: the body is as it is.

    Raises:
        ContentCodingError: it is not one of gzip and deflate, or there are several.
    """
    names = [name.strip().lower() for name in ",".join(headers).split(",")]
    coded = [name for name in names if name not in ("", "identity")]
    if not coded:
        return None
    coding = _NAMES.get(coded[0])
    if coding is None:
        raise ContentCodingError(
            f"the content coding {quote(coded[0])} is not supported by this server; use gzip, deflate or none"
        )
    if len(coded) > 1:
        raise ContentCodingError("the body has more than one content coding; use gzip, deflate or none")
    return coding


def decode_content(body: bytes, coding: str, *, limit: int) -> bytes:
    """The body without its coding. With gzip it may have several members, one behind the other (RFC 1952, 2.2).

    Args:
        limit: bytes of the result, of all members together; twice as many are held in memory at most.

    Raises:
        BodyTooLargeError: there are more.
        InvalidRequestError: the body is not whole, or not in this coding; or it has too many members.
    """
    bits = _GZIP_BITS if coding == "gzip" else _deflate_bits(body)
    decoded = bytearray()
    start = num_members = 0
    while start < len(body) or not num_members:
        if num_members == MAX_MEMBERS:
            raise InvalidRequestError(f"the body has more than {MAX_MEMBERS} gzip members, the limit of this server")
        if num_members and coding != "gzip":
            raise InvalidRequestError(f"the body is not valid {coding}: something follows its end")
        start, problem = _decode_member(memoryview(body), start, bits, decoded, limit)
        if problem is not None:
            raise InvalidRequestError(f"the body is not valid {coding}: {problem}")
        if len(decoded) > limit:
            raise BodyTooLargeError(limit)
        num_members += 1
    return bytes(decoded)


def _decode_member(body: memoryview, start: int, bits: int, decoded: bytearray, limit: int) -> tuple[int, str | None]:
    """Add to `decoded` what the member at `start` has, up to one byte more than the limit.

    In pieces, since zlib copies what is behind a member: the time would grow with the number of members times the size.

    Returns:
        Where the next member begins, and what is wrong with this one. zlib's own error is not raised on: it would be
        the context of the one that is, and holds the body.
    """
    decoder = zlib.decompressobj(bits)
    try:
        while not decoder.eof and start < len(body) and len(decoded) <= limit:
            piece = body[start : start + _PIECE_BYTES]
            decoded += decoder.decompress(piece, limit + 1 - len(decoded))
            start += len(piece)
    except zlib.error as error:
        return start, str(error)
    if not decoder.eof and len(decoded) <= limit:
        return start, "it ends too early"
    return start - len(decoder.unused_data), None


def _deflate_bits(body: bytes) -> int:
    """For zlib's format, which `deflate` means (RFC 9110, 8.4.1.2), or for bare deflate, which some clients send."""
    has_header = len(body) > 1 and body[0] & 0x0F == zlib.DEFLATED and (body[0] * 256 + body[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
