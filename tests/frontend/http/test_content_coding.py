"""Bodies with a content coding: read up to the limit of bodies, refused if the coding is not known."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_client import FakeClient
from tests.support.http_server import BODIES, COMPLETION, Reply, open_server
from trio_llm.errors import BodyTooLargeError, InvalidRequestError
from trio_llm.frontend.http.content_coding import MAX_MEMBERS, ContentCodingError, decode_content, find_coding

MIB = 1024 * 1024


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


ENCODERS: dict[str, Any] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "identity, gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate ,identity": raw_deflate,
    "identity": bytes,
    "": bytes,
}


async def post(path: str, body: bytes, coding: str, **settings: Any) -> Reply:
    headers = {"content-type": "application/json", "content-encoding": coding}
    async with open_server(FakeClient(), **settings) as server:
        reply = await server.call("POST", path, body, headers)
        assert (await server.chat()).status == 200
        return reply


@pytest.mark.parametrize(("path", "fields"), BODIES.items())
@pytest.mark.parametrize("coding", ENCODERS)
async def test_a_body_in_a_known_coding_is_read_on_every_path(path: str, fields: dict[str, Any], coding: str) -> None:
    reply = await post(path, ENCODERS[coding](json.dumps(fields).encode()), coding)

    assert reply.status == 200, reply.body


async def test_a_body_of_control_may_be_coded_too() -> None:
    body = gzip.compress(b'{"method": "ping"}')

    assert (await post("/collective_rpc", body, "gzip", dev_mode=True)).status == 501
    assert (await post("/collective_rpc", body, "br", dev_mode=True)).status == 415


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "aes128gcm", "gzip, br", "br, gzip", "gzip, gzip"])
async def test_another_coding_is_a_415_that_names_it(coding: str) -> None:
    reply = await post("/v1/completions", gzip.compress(b"{}"), coding)

    assert (reply.status, reply.error["type"]) == (415, "invalid_request_error")
    first = coding.partition(",")[0]
    named = repr(first) if first != "gzip" else "more than one content coding"
    assert named in reply.error["message"]
    assert "use gzip, deflate or none" in reply.error["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "break_it",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: b"not " + data,
        lambda data: data[:-6] + bytes([data[-6] ^ 255]) + data[-5:],
    ],
    ids=["end cut", "half", "nothing", "more", "other", "check sum"],
)
async def test_a_body_that_is_not_in_its_coding_is_a_400_that_says_so(coding: str, break_it: Any) -> None:
    body = break_it(ENCODERS[coding](json.dumps(COMPLETION).encode()))
    reply = await post("/v1/completions", body, coding)

    assert reply.status == 400
    assert f"not valid {coding}" in reply.error["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_grows_over_the_limit_is_a_413(coding: str) -> None:
    body = ENCODERS[coding](json.dumps(COMPLETION).encode().ljust(1001))
    within = ENCODERS[coding](json.dumps(COMPLETION).encode().ljust(1000))

    assert (await post("/v1/completions", within, coding, max_body_bytes=1000)).status == 200
    reply = await post("/v1/completions", body, coding, max_body_bytes=1000)
    assert (reply.status, "1000 bytes" in reply.error["message"]) == (413, True)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_decoding_stops_at_the_limit_however_much_there_would_be(coding: str) -> None:
    bomb = ENCODERS[coding](bytes(256 * MIB))
    assert len(bomb) < MIB
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            decode_content(bomb, coding, limit=MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * MIB


def test_a_gzip_body_may_have_several_members_all_under_the_limit() -> None:
    parts = [b'{"prompt":', b"", b'"x"', b"}" * 1000]
    body = b"".join(map(gzip.compress, parts))

    assert decode_content(body, "gzip", limit=1013) == b"".join(parts)
    with pytest.raises(BodyTooLargeError):
        decode_content(body, "gzip", limit=1012)
    for broken in (body[:-1], body + b"x", body + b"\x1f\x8b"):
        with pytest.raises(InvalidRequestError, match="not valid gzip"):
            decode_content(broken, "gzip", limit=5000)
    with pytest.raises(InvalidRequestError, match="something follows its end"):
        decode_content(zlib.compress(b"a") * 2, "deflate", limit=5000)


def test_members_that_lie_across_the_pieces_that_are_decoded_are_read() -> None:
    parts = [random.Random(size).randbytes(size) for size in (65_500, 65_536, 1, 200_000, 0, 70_000)]

    assert decode_content(b"".join(map(gzip.compress, parts)), "gzip", limit=MIB) == b"".join(parts)


def test_members_beyond_their_limit_are_refused() -> None:
    one = gzip.compress(b"a")

    assert decode_content(one * MAX_MEMBERS, "gzip", limit=MIB) == b"a" * MAX_MEMBERS
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_MEMBERS} gzip members"):
        decode_content(one * (MAX_MEMBERS + 1), "gzip", limit=MIB)


def test_a_bomb_behind_a_small_member_is_stopped_at_the_limit() -> None:
    bomb = gzip.compress(b"a") + gzip.compress(bytes(256 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            decode_content(bomb, "gzip", limit=MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * MIB


async def test_a_body_of_two_members_is_answered() -> None:
    text = json.dumps(COMPLETION).encode()

    reply = await post("/v1/completions", gzip.compress(text[:5]) + gzip.compress(text[5:]), "gzip")

    assert reply.status == 200


@given(data=st.binary(max_size=300), coding=st.sampled_from(["gzip", "deflate"]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_decoded_or_refused(data: bytes, coding: str) -> None:
    assert decode_content(ENCODERS[coding](data), coding, limit=300) == data
    with suppress(InvalidRequestError):
        assert len(decode_content(data, coding, limit=1000)) <= 1000


def test_all_headers_together_name_the_coding() -> None:
    assert find_coding([]) is None
    assert find_coding(["identity", "gzip"]) == "gzip"
    with pytest.raises(ContentCodingError, match="more than one"):
        find_coding(["gzip", "deflate"])
