"""The codec: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.errors import CodecError
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire import codec
from trio_llm.wire.codec import decode_from_engine, decode_to_engine, encode
from trio_llm.wire.messages import (
    NO_SAMPLING,
    Abort,
    Ack,
    AllBlocksCleared,
    AttachClient,
    BlockRemoved,
    BlockStored,
    Continue,
    DetachClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    FromEngine,
    Heartbeat,
    KVEvent,
    LogprobRow,
    ModelConfig,
    Progress,
    Ready,
    SchedulerStats,
    ToEngine,
    UtilityCall,
    UtilityResult,
)

PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    seed=-(2**63),
    max_tokens=9,
    min_tokens=2,
    stop=("a", "\U0001f336"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=3,
    output_kind=RequestOutputKind.FINAL_ONLY,
    min_p=0.25,
    presence_penalty=-1.5,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={0: -100.0, 2**31 - 1: 0.5},
)

TO_ENGINE: list[ToEngine] = [
    EngineCoreRequest("r-1", [1, 2, 3], PARAMS, priority=-5, deadline_s=1.5, output_token_ids=[4]),
    EngineCoreRequest("r-2", [0], SamplingParams()),
    EngineCoreRequest("r-3", [0], SamplingParams(), resumable=True),
    Continue("r-3", [1, 2], PARAMS, [[3, 4]]),
    EngineCoreRequest("r-4", [0], NO_SAMPLING, pooling_params=PoolingParams(pooling="mean", normalize=False)),
    EngineCoreRequest("r-5", [0], NO_SAMPLING, pooling_params=PoolingParams(task="classify")),
    EngineCoreRequest("r-6", [0], NO_SAMPLING, pooling_params=PoolingParams()),
    Abort(["a", "b"]),
    Ack(2**40),
    UtilityCall(1, "ping", [None, True, -1, 0.5, "x"]),
    AttachClient(1, 2, "ipc:///in", "ipc:///out"),
    DetachClient(1),
]
FROM_ENGINE: list[FromEngine] = [
    EngineCoreOutputs(
        1,
        2,
        0.25,
        [
            EngineCoreOutput("r-1", 3, [4, 5], [LogprobRow([4, 9], [-0.5, -1.5], 1)], "stop", 5, None, 2),
            EngineCoreOutput("r-2", 0, [], finish_reason="error", error="why"),
            EngineCoreOutput("r-3", 0, [], finish_reason="error", error="late", is_expired=True),
            EngineCoreOutput("r-4", 5, [1], finish_reason="length", goes_on=True),
            EngineCoreOutput("r-5", 0, [], finish_reason="stop", pooled=b"\x00\x00\x80\x3f"),
        ],
        SchedulerStats(1, 2, 3, 4, 5, 6),
        [UtilityResult(1, {"a": 1}), UtilityResult(2, error="no"), UtilityResult(3, error="x", error_kind="invalid")],
        [
            BlockRemoved([b"0" * 16, b"\xff" * 16]),
            AllBlocksCleared(),
            BlockStored([b"1" * 16, b"2" * 16], None, [1, 2, 3, 4], 2),
            BlockStored([b"3" * 16], b"2" * 16, [5, 6], 2),
        ],
        "v2",
    ),
    EngineCoreOutputs(1, 3, 0.5, kv_events=[AllBlocksCleared()]),
    EngineCoreOutputs(1, 4, 0.5, stats=SchedulerStats(1, num_tokens_of_others=2**40)),
    Ready(
        1,
        ModelConfig(
            model_dir="/m",
            max_model_len=10,
            logits_width=20,
            num_blocks=30,
            block_size=32,
            dtype="float32",
            device="cpu",
            eos_token_ids=(2, 3),
            tasks=("generate",),
            versions={"torch": "2"},
        ),
    ),
    Progress(1, "load", 1, 2),
    Heartbeat(3),
    EngineDead(1, "why"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_to_the_engine_arrives_as_it_was_sent(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_from_the_engine_arrives_as_it_was_sent(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_every_kind_of_message_is_among_the_examples() -> None:
    assert {type(m) for m in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(m) for m in FROM_ENGINE} == set(get_args(FromEngine))
    events = [e for m in FROM_ENGINE if isinstance(m, EngineCoreOutputs) for e in m.kv_events]
    assert {type(e) for e in events} == set(get_args(KVEvent))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(CodecError):
        decode_to_engine(encode(Heartbeat(1)))
    with pytest.raises(CodecError):
        decode_from_engine(encode(Ack(1)))


def decodes_or_refuses(decode: Callable[[bytes], object], frame: bytes) -> bool:
    try:
        decode(frame)
    except CodecError:
        return False
    return True


DECODERS = pytest.mark.parametrize("decode", [decode_to_engine, decode_from_engine])


@DECODERS
@given(frame=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_the_codecs_error(decode: Callable[[bytes], object], frame: bytes) -> None:
    decodes_or_refuses(decode, frame)


@DECODERS
@given(data=st.data())
def test_a_damaged_frame_raises_nothing_but_the_codecs_error(decode: Callable[[bytes], object], data: Any) -> None:
    examples = TO_ENGINE if decode is decode_to_engine else FROM_ENGINE
    frame = bytearray(encode(data.draw(st.sampled_from(examples))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))

    decodes_or_refuses(decode, bytes(frame))
    decodes_or_refuses(decode, bytes(frame[:cut]))
    decodes_or_refuses(decode, bytes(frame) + bytes(frame[cut:]))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@DECODERS
@given(data=st.data())
def test_a_field_of_any_other_value_raises_nothing_but_the_codecs_error(
    decode: Callable[[bytes], object], data: Any
) -> None:
    examples = TO_ENGINE if decode is decode_to_engine else FROM_ENGINE
    fields = msgspec.to_builtins(data.draw(st.sampled_from(examples)))
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(PLAIN)

    decodes_or_refuses(decode, msgspec.msgpack.encode(fields))


@DECODERS
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x91" * 1_000_000, id="deep arrays"),
        pytest.param(b"\x97\xa3add\xa1a\x91\x01\x90" + b"\x91" * 200_000, id="deep arrays in a field"),
        pytest.param(b"\x92\xa9heartbeat" + b"\x81\xa1a" * 200_000, id="deep maps"),
        pytest.param(b"\x93\xa9heartbeat\x01" + b"\x91" * 500_000, id="deep arrays in an unknown field"),
        pytest.param(b"\x92\xa3ack\xc7\x08\x01" + b"\0" * 8, id="an Ext object"),
        pytest.param(b"\x92\xa3ack\xcf" + b"\xff" * 8, id="an integer over int64"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array that claims four billion elements"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="a string that claims four gigabytes"),
        pytest.param(b"\x92\xa5abort\x91\xa3\xed\xb2\x97", id="a lone surrogate"),
    ],
)
def test_a_hostile_frame_raises_nothing_but_the_codecs_error(decode: Callable[[bytes], object], frame: bytes) -> None:
    decodes_or_refuses(decode, frame)


def test_a_frame_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Abort(["a" * 100]))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(frame) - 1)

    with pytest.raises(CodecError, match="the limit is"):
        decode_to_engine(frame)
    with pytest.raises(CodecError, match="the limit is"):
        encode(Abort(["a" * 100]))


@pytest.mark.parametrize("message", [Abort(["\udc97"]), Ack(2**64), Ack(-(2**63) - 1)])
def test_a_value_without_a_form_on_the_wire_is_the_codecs_error(message: ToEngine) -> None:
    with pytest.raises(CodecError):
        encode(message)


def test_parameters_out_of_range_are_refused_on_the_engines_side_too() -> None:
    fields = msgspec.to_builtins(EngineCoreRequest("r", [1], SamplingParams(temperature=0.5)))
    params = next(i for i, field in enumerate(fields) if isinstance(field, list) and field and field[0] == 0.5)
    fields[params][0] = float("nan")

    with pytest.raises(CodecError, match="temperature"):
        decode_to_engine(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "params", [["sing"], ["embed", "first"], ["embed", "mean", 1], ["classify", "mean"], ["classify", None, False]]
)
def test_pooling_parameters_that_are_wrong_are_refused_on_the_engines_side_too(params: list[Any]) -> None:
    fields = msgspec.to_builtins(EngineCoreRequest("r", [1], NO_SAMPLING, pooling_params=PoolingParams()))
    assert decode_to_engine(msgspec.msgpack.encode(fields))
    assert fields[-1] == ["embed", None, True], "the last field is the one to be damaged"

    with pytest.raises(CodecError):
        decode_to_engine(msgspec.msgpack.encode([*fields[:-1], params]))
