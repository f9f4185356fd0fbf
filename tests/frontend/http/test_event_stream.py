"""Event streams over time: when the response starts, and what fills silence. With a mock clock."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from starlette.responses import Response

from tests.support.exchange import Exchange, Post
from tests.support.fake_client import End, FakeClient, Held, Pause, Step
from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.http.answers.generation import Generation, RunningRequests
from trio_llm.frontend.http.event_stream import FIRST_OUTPUT_S, EventStreamResponse
from trio_llm.frontend.http.openai.chunks import CompletionChunks, StreamUsage
from trio_llm.frontend.http.openai.responses import AnswerHead
from trio_llm.frontend.http.server.shell import Message, Receive, Scope, Send
from trio_llm.sampling import SamplingParams

COMMENT = b": keep-alive\n\n"


class Timed(Exchange):
    """Remembers when each message was sent, and what a text in it was."""

    def __init__(self, *script: Step, prompts: int = 1, send_s: float = 0, **settings: Any) -> None:
        self.client = FakeClient(*script)
        self.send_s = send_s
        self.times: list[float] = []
        self.begin = trio.current_time()
        generation = Generation(
            client=self.client,
            running=RunningRequests(),
            prompts=["x"] * prompts,
            params=SamplingParams(),
            request_id="R",
        )
        chunks = CompletionChunks(AnswerHead(id="cmpl-R", created=1, model="m"), StreamUsage())
        response = EventStreamResponse(generation, chunks, keep_alive_s=10)
        assert isinstance(response, Response)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await response(scope, receive, send)

        super().__init__(app, **settings)

    async def _send(self, message: Message) -> None:
        self.times.append(round(trio.current_time() - self.begin, 3))
        await trio.sleep(self.send_s)
        await super()._send(message)

    @property
    def timeline(self) -> list[tuple[float, str]]:
        kinds = []
        for message in self.sent:
            if message["type"] == "http.response.start":
                kinds.append(str(message["status"]))
            elif message["body"] == COMMENT:
                kinds.append("comment")
            else:
                kinds.append("done" if message["body"].endswith(b"data: [DONE]\n\n") else "text")
        return list(zip(self.times, kinds, strict=True))


async def test_the_response_starts_with_the_first_output(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed(Pause(3), "a", End("b"))
    await exchange.run()

    assert exchange.timeline == [(3, "200"), (3, "text"), (3, "text"), (3, "done")]


async def test_silence_before_the_first_output_starts_the_response_and_is_filled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    exchange = Timed(Pause(26), "a", End())
    await exchange.run()

    assert exchange.timeline == [
        (5, "200"),
        (5, "comment"),
        (15, "comment"),
        (25, "comment"),
        (26, "text"),
        (26, "text"),
        (26, "done"),
    ]


async def test_silence_between_outputs_is_filled(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed("a", Pause(25), "b", Pause(9), "c", Pause(11), End())
    await exchange.run()

    assert [time for time, kind in exchange.timeline if kind == "comment"] == [10, 20, 44]


async def test_tokens_whose_text_is_held_back_do_not_break_the_silence(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed("a", Pause(6), Held("x"), Pause(6), Held("y"), Pause(6), End("z"))
    await exchange.run()

    assert [time for time, kind in exchange.timeline if kind == "comment"] == [10]


async def test_an_error_within_the_first_seconds_is_a_status(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed(Pause(FIRST_OUTPUT_S - 0.1), EngineGenerateError("row failed"))
    await exchange.run()

    assert exchange.status == 500
    assert b"row failed" in exchange.body


async def test_an_error_after_that_is_an_event(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed(Pause(FIRST_OUTPUT_S + 0.1), EngineGenerateError("row failed"))
    await exchange.run()

    assert exchange.timeline == [(5, "200"), (5, "comment"), (5.1, "done")]
    assert exchange.body.count(b"data: ") == 2


@pytest.mark.parametrize("prompts", [1, 2])
async def test_an_output_that_comes_in_the_turn_of_the_deadline_is_not_lost(
    prompts: int, mock_clock: trio.testing.MockClock
) -> None:
    arrives = trio.Event()
    exchange = Timed("a", arrives, "b", End("c"), prompts=prompts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        # The reader is woken with an output, and before it runs the time for a comment has come.
        arrives.set()
        mock_clock.jump(60)

    for text in (b'"text":"a"', b'"text":"b"', b'"text":"c"', b'"finish_reason":"stop"'):
        assert exchange.body.count(text) == prompts
    assert exchange.body.count(b"[DONE]") == 1


async def test_a_client_that_reads_slowly_gets_everything(autojump_clock: trio.testing.MockClock) -> None:
    exchange = Timed("a", "b", End("c"), send_s=25)
    await exchange.run()

    assert [kind for _, kind in exchange.timeline] == ["200", "text", "text", "text", "done"]


async def test_a_client_that_leaves_in_a_quiet_phase_ends_the_generation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    exchange = Timed("a", "hang")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(12)
        assert exchange.timeline[-1] == (10, "comment")
        await exchange.feed.send({"type": "http.disconnect"})

    assert exchange.client.asked[0].left.is_set()
    assert exchange.timeline[-1] == (10, "comment")


@pytest.mark.parametrize("num_tokens", range(12))
async def test_a_prompt_that_fails_at_any_moment_does_not_cut_what_is_sent_of_another(num_tokens: int) -> None:
    class Whole(Post):
        num_cut = 0

        async def _send(self, message: Message) -> None:
            try:
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                self.num_cut += 1
                raise
            await super()._send(message)

    failing: tuple[Step, ...] = (*[Held("x")] * num_tokens, EngineGenerateError("row failed"))
    client = FakeClient(scripts=[("a", "b", "c", "hang"), failing])
    exchange = Whole(client, prompt=["one", "two"], stream=True)
    await exchange.run()

    assert exchange.num_cut == 0
    assert exchange.body.count(b"row failed") == 1
    assert exchange.status == 500 or exchange.body.endswith(b"data: [DONE]\n\n")
