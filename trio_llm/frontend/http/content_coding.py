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

__all__ = ["ContentCodingError", "decode_content", "find_coding"]

_NAMES: Final = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS


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
    """The body without its coding.

    Args:
        limit: bytes of the result; as many are held in memory at most.

    Raises:
        BodyTooLargeError: there are more.
        InvalidRequestError: the body is not whole, or not in this coding.
    """
    decoder = zlib.decompressobj(_GZIP_BITS if coding == "gzip" else _deflate_bits(body))
    try:
        decoded = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {coding}: {error}") from None
    if len(decoded) > limit:
        raise BodyTooLargeError(limit)
    if not decoder.eof:
        raise InvalidRequestError(f"the body is not valid {coding}: it ends too early")
    if decoder.unused_data:
        raise InvalidRequestError(f"the body is not valid {coding}: something follows its end")
    return decoded


def _deflate_bits(body: bytes) -> int:
    """For zlib's format, which `deflate` means (RFC 9110, 8.4.1.2), or for bare deflate, which some clients send."""
    has_header = len(body) > 1 and body[0] & 0x0F == zlib.DEFLATED and (body[0] * 256 + body[1]) % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
