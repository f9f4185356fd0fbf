"""Deadlines of readers: they go with the request, and one that was moved costs nothing but the place in the line."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from trio_llm.errors import EngineDeadError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.stream import GenerateStream, seconds_left
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import Abort, EngineCoreRequest, ToEngine

HELLO = list(b"hello")
SHORT = SamplingParams(max_tokens=3)
ONE_AT_A_TIME = {"max_num_seqs": 1}
STEP_S = 0.1


def blocking(seconds: float) -> SamplingParams:
    """Parameters of a request that has the engine for itself for so long."""
    return SamplingParams(max_tokens=round(seconds / STEP_S))


class Engine:
    """What an engine is sent and what it computes."""

    def __init__(self, fake: FakeSetUp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.sent: list[ToEngine] = []
        self.computed: set[str] = set()
        send, launch = fake.core.send_nowait, fake.core.core._executor.launch

        def note_sent(message: ToEngine) -> None:
            self.sent.append(message)
            send(message)

        def note_computed(plan: Any) -> Any:
            self.computed |= {chunk.sequence.request_id.rpartition("-")[0] for chunk in plan.chunks}
            return launch(plan)

        monkeypatch.setattr(fake.core, "send_nowait", note_sent)
        monkeypatch.setattr(fake.core.core._executor, "launch", note_computed)

    def deadlines_of(self, external_id: str) -> list[float | None]:
        return [
            message.deadline_s
            for message in self.sent
            if isinstance(message, EngineCoreRequest) and message.request_id.startswith(f"{external_id}-")
        ]

    async def num_waiting(self) -> int:
        return (await self.fake.llm.check_scheduler())["num_waiting"]


async def enter_within(seconds: float, stack: AsyncExitStack, stream: GenerateStream) -> GenerateStream:
    """Enter a stream with a deadline that does not hold for its block."""
    with trio.fail_after(seconds):
        return await stack.enter_async_context(stream)


async def rest_of(stream: GenerateStream) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.parametrize(("seconds", "expected"), [(3.0, 3.0), (-1.0, 0.0), (math.inf, None)])
async def test_the_time_left_is_that_of_the_nearest_deadline(
    seconds: float, expected: float | None, mock_clock: MockClock
) -> None:
    outer = trio.current_time() + 50 if expected is not None else math.inf
    inner = trio.current_time() + seconds
    with trio.CancelScope(deadline=outer), trio.CancelScope(deadline=inner):  # noqa: ASYNC100 - only looked at
        assert seconds_left() == expected


async def test_the_deadline_of_the_caller_goes_with_the_request(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_fake_llm() as fake:
        engine = Engine(fake, monkeypatch)
        with trio.move_on_after(12):
            async with fake.llm.generate(HELLO, SHORT, request_id="hurried") as stream:
                await rest_of(stream)
        async with fake.llm.generate(HELLO, SHORT, request_id="patient") as stream:
            await rest_of(stream)

        assert engine.deadlines_of("hurried") == [pytest.approx(12)]
        assert engine.deadlines_of("patient") == [None]


async def test_what_is_past_its_deadline_while_it_waits_is_dropped_and_never_computed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        engine = Engine(fake, monkeypatch)
        first = await stack.enter_async_context(fake.llm.generate(HELLO, blocking(20), request_id="first"))
        await anext(first)  # it runs
        await enter_within(2, stack, fake.llm.generate(HELLO, SHORT, request_id="second"))
        assert await engine.num_waiting() == 1

        outputs = await rest_of(first)  # the second one is neither read nor aborted

        assert outputs[-1].finished
        assert await engine.num_waiting() == 0
        assert engine.computed == {"first"}
        assert not any(isinstance(message, Abort) for message in engine.sent)


async def test_what_runs_is_not_dropped_when_its_deadline_passes(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        stream = await enter_within(2, stack, fake.llm.generate(HELLO, blocking(10)))

        outputs = await rest_of(stream)

        assert outputs[-1].outputs[0].finish_reason == "length"
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 100


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_whose_deadline_was_moved_gets_its_answer_all_the_same(
    kind: RequestOutputKind, n: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    params = SamplingParams(max_tokens=3, n=n, seed=5, temperature=1, output_kind=kind)
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake:
        engine = Engine(fake, monkeypatch)
        async with fake.llm.generate(HELLO, params) as stream:
            undisturbed = await rest_of(stream)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fake.llm.generate(HELLO, blocking(10)))
            with trio.CancelScope(deadline=trio.current_time() + 2) as scope:
                stream = await stack.enter_async_context(fake.llm.generate(HELLO, params, request_id="moved"))
                scope.deadline += 1000

                outputs = await rest_of(stream)

        # Only what stands in them: unread outputs may have been merged.
        tokens = [sorted(_tokens(one).items()) for one in (undisturbed, outputs)]
        assert tokens[0] == tokens[1]
        assert all(output.outputs for output in outputs)
        assert [output.finished for output in outputs].count(True) == 1
        if n == 1:
            first, second = engine.deadlines_of("moved")
            assert first == pytest.approx(2)
            assert second is not None
            assert 900 < second < 1001
        await fake.assert_nothing_is_left()


async def test_a_prompt_that_the_caller_has_changed_since_is_sent_again_as_it_was(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        engine = Engine(fake, monkeypatch)
        await stack.enter_async_context(fake.llm.generate(HELLO, blocking(4)))
        prompt = list(HELLO)
        stream = await enter_within(2, stack, fake.llm.generate(prompt, SHORT, request_id="moved"))
        prompt.clear()
        await trio.sleep(3)
        await rest_of(stream)

        prompts = [
            message.prompt_token_ids
            for message in engine.sent
            if isinstance(message, EngineCoreRequest) and message.request_id.startswith("moved-")
        ]
        assert prompts == [HELLO, HELLO]


def _tokens(outputs: list[RequestOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        for choice in output.outputs:
            found.setdefault(choice.index, []).extend(choice.token_ids)
    return {index: ids[-3:] for index, ids in found.items()}


async def test_a_deadline_that_is_moved_again_and_again_is_not_heeded_any_more(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        engine = Engine(fake, monkeypatch)
        await stack.enter_async_context(fake.llm.generate(HELLO, blocking(60)))
        stream = await enter_within(2, stack, fake.llm.generate(HELLO, SHORT, request_id="moved"))
        outputs: list[RequestOutput] = []
        while not outputs or not outputs[-1].finished:
            with trio.move_on_after(3):  # as a reader does that fills silence with signs of life
                outputs.append(await anext(stream))

        *given, last = engine.deadlines_of("moved")
        assert last is None
        assert len(given) == 2


async def test_a_request_that_was_dropped_still_counts_until_its_reader_leaves(autojump_clock: MockClock) -> None:
    limits = {**ONE_AT_A_TIME, "max_num_queued_reqs": 2}
    async with open_fake_llm(step_s=STEP_S, engine=limits) as fake, AsyncExitStack() as stack:
        first = await stack.enter_async_context(fake.llm.generate(HELLO, blocking(10)))
        async with AsyncExitStack() as inner:
            await enter_within(2, inner, fake.llm.generate(HELLO, SHORT))
            await rest_of(first)

            assert fake.llm._registry._ledger.num_requests == 1
            assert fake.llm._registry._ledger.num_tokens == len(HELLO)

        await fake.assert_nothing_is_left()


async def test_a_dropped_request_can_be_aborted_and_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        engine = Engine(fake, monkeypatch)
        await stack.enter_async_context(fake.llm.generate(HELLO, blocking(60)))
        stream = await enter_within(2, stack, fake.llm.generate(HELLO, SHORT, request_id="dropped"))
        await trio.sleep(5)

        assert fake.llm.abort("dropped") == 1
        outputs = await rest_of(stream)

        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        assert len(engine.deadlines_of("dropped")) == 1


async def test_the_reader_of_a_dropped_request_learns_of_the_death_of_the_engine(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        await stack.enter_async_context(fake.llm.generate(HELLO, blocking(60)))
        stream = await enter_within(2, stack, fake.llm.generate(HELLO, SHORT))
        await trio.sleep(5)
        fake.core.kill("lost")
        await fake.llm.wait_dead()

        with pytest.raises(EngineDeadError):
            await rest_of(stream)


async def test_cancelling_a_reader_of_a_dropped_request_at_any_checkpoint_leaves_nothing_behind(
    autojump_clock: MockClock,
) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake:

        async def read_what_was_dropped(llm: AsyncLLM) -> None:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(llm.generate(HELLO, blocking(4)))
                stream = await enter_within(0.5, stack, llm.generate(HELLO, SHORT))
                await rest_of(stream)

        num_checkpoints = await cancel_at_every_checkpoint(
            lambda: read_what_was_dropped(fake.llm), fake.assert_nothing_is_left
        )

        assert num_checkpoints >= 5


async def test_a_reader_that_is_cancelled_before_it_sends_again_may_read_on(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=STEP_S, engine=ONE_AT_A_TIME) as fake, AsyncExitStack() as stack:
        await stack.enter_async_context(fake.llm.generate(HELLO, blocking(5)))
        stream = await enter_within(1, stack, fake.llm.generate(HELLO, SHORT))
        await trio.sleep(3)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert scope.cancelled_caught

        assert (await rest_of(stream))[-1].finished
