"""Channel: messages over a stream, whole and in order, however the bytes are cut."""

from __future__ import annotations

import pytest
import trio
from trio.testing import memory_stream_pair

from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import CodecError, EngineGenerateError, InvalidRequestError, NotSupportedError, TrioLLMError
from trio_llm.frontend.control.state import ControlState
from trio_llm.supervisor.channel import Channel
from trio_llm.supervisor.errors import make_error, make_error_answer
from trio_llm.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    Boot,
    ControlAnswer,
    EngineDied,
    EngineStates,
    Stop,
    ToFrontEnd,
    decode_from_front_end,
    decode_to_front_end,
    encode,
)

MESSAGES: list[ToFrontEnd] = [
    Boot(
        engine=EngineConfig(max_num_seqs=3),
        server=ServerConfig(port=0, served_model_names=("a", "b")),
        num_engines=2,
        client_index=1,
        listener_fds=[5],
        load_fd=6,
        log_level="info",
    ),
    EngineStates(states=[ControlState(), ControlState(sleep_level=1, weights_asleep=True)], num_calls=1),
    ControlAnswer(call_id=7, answers=[None, True, 3, "text", [1, "two"], {"three": 4.0}]),
    EngineDied(engine_index=1, reason="x" * 100_000),
    Stop(),
]


@pytest.mark.parametrize("size", [1, 3, 1000, 10**6])
async def test_messages_come_whole_and_in_order_however_the_bytes_are_cut(size: int) -> None:
    ours, theirs = memory_stream_pair()
    sender, receiver = Channel(ours, decode_from_front_end), Channel(theirs, decode_to_front_end)
    for message in MESSAGES:
        sender.send_nowait(message)
    received = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run)
        pieces, cut = memory_stream_pair()
        receiver = Channel(cut, decode_to_front_end)

        async def cut_up() -> None:
            async for data in theirs:
                for start in range(0, len(data), size):
                    await pieces.send_all(data[start : start + size])

        nursery.start_soon(cut_up)
        with trio.fail_after(60):
            for _ in MESSAGES:
                received.append(await receiver.receive())
        nursery.cancel_scope.cancel()

    assert received == MESSAGES


async def test_the_end_of_the_other_side_ends_both_directions() -> None:
    ours, theirs = memory_stream_pair()
    channel = Channel(ours, decode_to_front_end)
    await theirs.aclose()
    channel.send_nowait(Stop())

    with trio.fail_after(5):
        await channel.run()
        assert await channel.receive() is None


async def test_cancelling_receive_takes_nothing() -> None:
    ours, theirs = memory_stream_pair()
    channel = Channel(theirs, decode_to_front_end)
    frame = encode(Stop())
    for byte in frame:
        with trio.move_on_after(0):
            await channel.receive()
        await ours.send_all(bytes([byte]))

    with trio.fail_after(5):
        assert await channel.receive() == Stop()


@pytest.mark.parametrize(
    "data", [(MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\x01\xc1", encode(MESSAGES[0])[:4] + b"\xff" * 1000]
)
async def test_what_is_no_message_is_an_error(data: bytes) -> None:
    ours, theirs = memory_stream_pair()
    await ours.send_all(data + bytes(1000))

    with trio.fail_after(5), pytest.raises(CodecError):
        await Channel(theirs, decode_to_front_end).receive()


def test_a_message_without_a_form_is_refused_at_once() -> None:
    with pytest.raises(CodecError):
        encode(ControlAnswer(call_id=1, answers=["\ud800"]))
    with pytest.raises(CodecError, match="longer"):
        encode(EngineDied(engine_index=1, reason="x" * (MAX_MESSAGE_BYTES + 1)))


@pytest.mark.parametrize(
    "error", [EngineGenerateError("a"), InvalidRequestError("b", "level"), NotSupportedError("c"), TrioLLMError("d")]
)
def test_errors_of_calls_arrive_as_what_they_were(error: TrioLLMError) -> None:
    answer = decode_to_front_end(encode(make_error_answer(3, error))[4:])
    assert isinstance(answer, ControlAnswer)
    copy = make_error(answer)

    assert str(copy) == str(error)
    assert type(copy) is (EngineGenerateError if type(error) is TrioLLMError else type(error))
    assert getattr(copy, "param", None) == getattr(error, "param", None)
