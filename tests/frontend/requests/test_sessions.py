"""Sessions: inputs one after the other continue one request, and nothing of it stays, however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    PromptTooLongError,
    QueuedTokensError,
    QueueFullError,
)
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.requests.stream import RequestStream
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import Continue, EngineCoreRequest, ToEngine

GREEDY = SamplingParams(temperature=0, max_tokens=5)
INPUTS = [[10, 11, 12], [20], [30, 31]]


async def giving(*inputs: StreamingInput | list[int] | str, then: Exception | None = None) -> AsyncIterator[Any]:
    for one in inputs:
        yield one if isinstance(one, StreamingInput) else StreamingInput(one)
    if then is not None:
        raise then


async def read(stream: RequestStream) -> list[list[RequestOutput]]:
    """The outputs of each answer, and as a last entry that which ends the session."""
    answers: list[list[RequestOutput]] = [[]]
    async for output in stream:
        answers[-1].append(output)
        if output.outputs[0].finish_reason is not None and not output.finished:
            answers.append([])
    return answers


async def read_one_answer(stream: RequestStream) -> list[RequestOutput]:
    outputs = [await anext(stream)]
    while outputs[-1].outputs[0].finish_reason is None:
        outputs.append(await anext(stream))
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


async def answer_alone(llm: AsyncLLM, token_ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return (await llm.complete(token_ids, params)).outputs[0].token_ids


async def answers_alone(llm: AsyncLLM, inputs: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """What requests over all the tokens before each answer give."""
    so_far: list[int] = []
    answers = []
    for token_ids in inputs:
        so_far += token_ids
        answers.append(await answer_alone(llm, so_far, params))
        so_far += answers[-1]
    return answers


def count_computed(fake: FakeSetUp, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each chunk that is computed from now on."""
    counts: list[int] = []
    launch = fake.core.core._executor.launch

    def note(plan: Any) -> Any:
        counts.extend(chunk.count for chunk in plan.chunks)
        return launch(plan)

    monkeypatch.setattr(fake.core.core._executor, "launch", note)
    return counts


# ------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("num_inputs", [1, 2, 3])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=5)], ids=["greedy", "sampled"])
async def test_each_answer_is_that_of_one_request_over_all_tokens_before_it(
    num_inputs: int, params: SamplingParams
) -> None:
    inputs = INPUTS[:num_inputs]
    async with open_fake_llm() as fake:
        expected = await answers_alone(fake.llm, inputs, params)

        async with fake.llm.generate(giving(*inputs), params) as stream:
            *answers, last = await read(stream)

        assert [tokens(answer) for answer in answers] == expected
        assert [answer[-1].outputs[0].finish_reason for answer in answers] == ["length"] * num_inputs
        assert not any(output.finished for answer in answers for output in answer)
        assert [(one.finished, one.outputs[0].finish_reason, one.outputs[0].text) for one in last] == [
            (True, "length", "")
        ]
        await fake.assert_nothing_is_left()


async def test_no_token_of_a_session_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fake_llm() as fake:
        counts = count_computed(fake, monkeypatch)

        async with fake.llm.generate(giving(*INPUTS), GREEDY) as stream:
            answers = await read(stream)

        # The last token of the last answer is never computed; that of an earlier one is, with the input after it.
        assert sum(counts) == sum(map(len, INPUTS)) + sum(map(len, map(tokens, answers))) - 1
        assert counts == [3, 1, 1, 1, 1, 2, 1, 1, 1, 1, 3, 1, 1, 1, 1]


async def test_each_input_may_have_its_own_parameters() -> None:
    async with open_fake_llm() as fake:
        inputs = giving(
            StreamingInput([1], SamplingParams(temperature=0, max_tokens=2)),
            StreamingInput([2], SamplingParams(temperature=0, max_tokens=3, logprobs=1)),
            StreamingInput([3]),
        )
        async with fake.llm.generate(inputs, GREEDY) as stream:
            *answers, _ = await read(stream)

        assert [len(tokens(answer)) for answer in answers] == [2, 3, 5]
        assert [answer[0].outputs[0].logprobs is not None for answer in answers] == [False, True, False]


async def test_each_answer_shows_special_tokens_as_its_own_parameters_say() -> None:
    special = 257
    async with open_fake_llm(script=(special,)) as fake:
        inputs = giving([1], StreamingInput([2], SamplingParams(max_tokens=1, skip_special_tokens=False)))
        async with fake.llm.generate(inputs, SamplingParams(max_tokens=1)) as stream:
            *answers, _ = await read(stream)

        assert [answer[0].outputs[0].text for answer in answers] == ["", "<|system|>"]


async def test_an_answer_that_ends_by_a_stop_token_keeps_it_before_the_next_input() -> None:
    async with open_fake_llm() as fake:
        first = await answer_alone(fake.llm, [1])
        stop = first[2]
        num_kept = first.index(stop) + 1
        second = await answer_alone(fake.llm, [1, *first[:num_kept], 2])

        inputs = giving(StreamingInput([1], SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(stop,))), [2])
        async with fake.llm.generate(inputs, GREEDY) as stream:
            *answers, _ = await read(stream)

        assert [tokens(answer) for answer in answers] == [first[:num_kept], second]
        assert (answers[0][-1].outputs[0].finish_reason, answers[0][-1].outputs[0].stop_reason) == ("stop", stop)


async def test_cumulative_outputs_begin_anew_with_each_answer() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=RequestOutputKind.CUMULATIVE)
    async with open_fake_llm() as fake:
        expected = await answers_alone(fake.llm, INPUTS, SamplingParams(temperature=0, max_tokens=3))

        async with fake.llm.generate(giving(*INPUTS), params) as stream:
            *answers, last = await read(stream)

        assert [answer[-1].outputs[0].token_ids for answer in answers] == expected
        assert last[0].outputs[0].token_ids == expected[-1]
        await fake.assert_nothing_is_left()


async def test_a_character_that_an_answer_leaves_unfinished_is_not_finished_by_the_next_input() -> None:
    first, second = "é".encode()
    async with open_fake_llm(script=(first,)) as fake:
        params = SamplingParams(max_tokens=1)
        async with fake.llm.generate(giving([65], [second]), params) as stream:
            *answers, _ = await read(stream)

        assert ["".join(output.outputs[0].text for output in answer) for answer in answers] == ["\ufffd", "\ufffd"]


async def test_outputs_count_the_tokens_of_all_inputs_so_far() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(giving("ab", "cde"), GREEDY) as stream:
            *answers, last = await read(stream)

        assert [answer[-1].num_prompt_tokens for answer in answers] == [2, 5]
        assert last[0].num_prompt_tokens == 5
        assert fake.llm.statistics().num_prompt_tokens == 5


async def test_inputs_may_come_from_inside_the_block_and_take_their_time(autojump_clock: trio.abc.Clock) -> None:
    async with open_fake_llm(step_s=1.0) as fake:
        expected = await answers_alone(fake.llm, INPUTS)
        send, receive = trio.open_memory_channel[StreamingInput](0)
        answers: list[list[int]] = []

        async with fake.llm.generate(receive, GREEDY) as stream:
            for token_ids in INPUTS:
                await trio.sleep(1000)
                await fake.llm.check_scheduler()
                assert fake.llm.num_running == fake.llm.num_waiting == 0
                await send.send(StreamingInput(token_ids))
                answers.append(tokens(await read_one_answer(stream)))
            send.close()
            assert (await anext(stream)).finished
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

        assert answers == expected
        await fake.assert_nothing_is_left()


async def test_a_session_counts_once_in_the_statistics() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(giving(*INPUTS), GREEDY) as stream:
            await read(stream)
        await fake.assert_nothing_is_left()

        assert sum(fake.llm.statistics().num_finished.values()) == 1


async def test_a_session_counts_once_for_admission_until_the_engine_has_confirmed_its_end() -> None:
    async with open_fake_llm(max_num_queued_reqs=1) as fake:
        async with fake.llm.generate(Endless([1], [2]), GREEDY) as stream:
            while (await anext(stream)).outputs[0].finish_reason is None:
                pass
            with pytest.raises(QueueFullError):
                await answer_alone(fake.llm, [1])
        await fake.llm.wait_idle()

        assert len(await answer_alone(fake.llm, [1])) == 5


async def test_an_idle_session_that_loses_its_blocks_goes_on_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fake_llm(num_blocks=4, max_model_len=120) as fake:
        expected = await answers_alone(fake.llm, [[1] * 40, [2]])
        send, receive = trio.open_memory_channel[StreamingInput](0)

        async with fake.llm.generate(receive, GREEDY) as stream:
            await send.send(StreamingInput([1] * 40))
            first = await read_one_answer(stream)
            assert fake.llm.num_free_blocks < 4
            assert len(await answer_alone(fake.llm, [3] * 100)) == 5
            assert fake.core.core.stats.num_preempted == 1
            counts = count_computed(fake, monkeypatch)
            await send.send(StreamingInput([2]))
            send.close()
            second, _ = await read(stream)

        assert [tokens(first), tokens(second)] == expected
        assert counts[0] == 46
        await fake.assert_nothing_is_left()


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(n=2), "n"),
        (SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), "output_kind"),
        (SamplingParams(stop=("x",)), "stop"),
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
    ],
)
async def test_what_a_session_cannot_do_is_refused_on_entering_and_of_a_later_input_by_the_stream(
    params: SamplingParams, param: str
) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as caught:
            async with fake.llm.generate(giving([1]), params):
                pass
        assert caught.value.param == param
        await fake.assert_nothing_is_left()

        with pytest.raises(InvalidRequestError) as caught:
            async with fake.llm.generate(giving([1], StreamingInput([2], params)), GREEDY) as stream:
                await read(stream)
        assert caught.value.param == param
        await fake.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (lambda: giving([1], []), InvalidRequestError),
        (lambda: giving([1], [-1]), InvalidRequestError),
        (lambda: giving([1], [2] * 120), PromptTooLongError),
        (lambda: giving([1], StreamingInput([2], SamplingParams(max_tokens=118))), PromptTooLongError),
        (lambda: giving([1], then=ValueError("mine")), ValueError),
    ],
    ids=["no tokens", "no token id", "too long", "no room for the answer", "raised by the iterable"],
)
async def test_what_is_wrong_with_a_later_input_comes_after_the_answers_before(
    inputs: Callable[[], AsyncIterator[Any]], error: type[Exception]
) -> None:
    outputs: list[RequestOutput] = []
    async with open_fake_llm(max_model_len=120) as fake:
        with pytest.raises(error):
            async with fake.llm.generate(inputs(), GREEDY) as stream:
                async for output in stream:
                    outputs.append(output)

        assert len(tokens(outputs)) == 5
        assert outputs[-1].outputs[0].finish_reason == "length"
        await fake.assert_nothing_is_left()


async def test_the_error_of_the_iterable_is_raised_as_itself() -> None:
    mine = ValueError("mine")
    async with open_fake_llm() as fake:
        with pytest.raises(ValueError, match="mine") as caught:
            async with fake.llm.generate(giving(then=mine), GREEDY) as stream:
                await anext(stream)

        assert caught.value is mine
        await fake.assert_nothing_is_left()


async def test_an_iterable_without_inputs_is_an_error() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError, match="no input"):
            async with fake.llm.generate(giving(), GREEDY) as stream:
                await anext(stream)

        await fake.assert_nothing_is_left()


async def test_an_input_of_another_type_is_an_error() -> None:
    async def strings() -> AsyncIterator[Any]:
        yield "text"

    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError, match="StreamingInput, not str"):
            async with fake.llm.generate(strings(), GREEDY) as stream:
                await anext(stream)

        await fake.assert_nothing_is_left()


async def test_a_row_that_fails_ends_the_session() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(EngineGenerateError, match="failed by the test"):
            async with fake.llm.generate(giving([1], [2], [3]), GREEDY) as stream:
                async for output in stream:
                    if output.outputs[0].finish_reason is not None:
                        fake.llm.fail_next_row()

        await fake.assert_nothing_is_left()


@pytest.mark.parametrize("request_id", ["\ud800", ""])
async def test_an_id_that_has_no_form_on_the_wire_is_refused_on_entering(request_id: str) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as caught:
            async with fake.llm.generate(giving([1]), GREEDY, request_id=request_id) as stream:
                await read(stream)
        assert caught.value.param == "request_id"
        await fake.assert_nothing_is_left()


# -------------------------------------------------------------------------------------- no room left


class Crowded:
    """An engine whose one place is taken, with 90 of 100 prompt tokens in its line."""

    def __init__(self, fake: FakeSetUp, stack: AsyncExitStack) -> None:
        self.fake = fake
        self.stack = stack
        self.line = AsyncExitStack()
        self.sent: list[ToEngine] = []

    async def crowd(self) -> None:
        self.fake.core.on_sent = self.sent.append
        running = await self.stack.enter_async_context(self.fake.llm.generate([1], SamplingParams(max_tokens=4000)))
        await anext(running)
        await self.stack.enter_async_context(self.line)
        await self.line.enter_async_context(self.fake.llm.generate([2] * 90, GREEDY))

    async def make_room(self) -> None:
        """The line is empty then, and the place is free."""
        await self.stack.aclose()

    @property
    def inputs(self) -> list[list[int]]:
        """That were sent."""
        return [
            message.token_ids if isinstance(message, Continue) else message.prompt_token_ids
            for message in self.sent
            if isinstance(message, Continue | EngineCoreRequest) and message.request_id.startswith("session-")
        ]


CROWDED: dict[str, Any] = {"max_num_queued_tokens": 100, "max_num_seqs": 1, "max_model_len": 5000, "num_blocks": 400}


@pytest.mark.parametrize("is_first", [False, True])
async def test_an_input_waits_until_the_limit_of_prompt_tokens_has_room_for_it(
    is_first: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with open_fake_llm(**CROWDED, step_s=0.1) as fake, AsyncExitStack() as stack:
        expected = await answers_alone(fake.llm, [[20] * 11] if is_first else [[10], [20] * 11])
        send, receive = trio.open_memory_channel[StreamingInput](0)
        crowded = Crowded(fake, stack)
        async with fake.llm.generate(receive, GREEDY, request_id="session") as stream:
            answers: list[list[int]] = []
            if not is_first:
                await send.send(StreamingInput([10]))
                answers.append(tokens(await read_one_answer(stream)))
            await crowded.crowd()
            await send.send(StreamingInput([20] * 11))
            send.close()
            await trio.testing.wait_all_tasks_blocked()
            assert crowded.inputs == []
            with pytest.raises(QueuedTokensError, match="101 prompt tokens wait"):
                await answer_alone(fake.llm, [1])

            await crowded.make_room()
            answer, _ = await read(stream)

        assert [*answers, tokens(answer)] == expected
        assert crowded.inputs == [[20] * 11]
        await fake.assert_nothing_is_left()


async def test_the_tokens_of_a_later_input_count_until_the_first_of_its_answer_has_come() -> None:
    async with open_fake_llm() as fake:
        send, receive = trio.open_memory_channel[StreamingInput](0)
        async with fake.llm.generate(receive, GREEDY) as stream:
            for token_ids in INPUTS:
                fake.llm.stall()
                await send.send(StreamingInput(token_ids))
                await trio.testing.wait_all_tasks_blocked()
                assert fake.llm._registry._ledger.num_tokens == len(token_ids)
                fake.llm.resume()
                await anext(stream)
                assert fake.llm._registry._ledger.num_tokens == 0
                await read_one_answer(stream)
        await fake.assert_nothing_is_left()


@asynccontextmanager
async def crowded_line(llm: AsyncLLM) -> AsyncIterator[None]:
    async with llm.generate([1], SamplingParams(max_tokens=4000)), llm.generate([2] * 90, GREEDY):
        yield


async def leave_while_an_input_waits(llm: AsyncLLM) -> None:
    async with crowded_line(llm), llm.generate(giving([3] * 90), GREEDY) as stream:
        with trio.move_on_after(1):
            await anext(stream)


async def read_what_has_waited(llm: AsyncLLM) -> None:
    async with AsyncExitStack() as stack:
        async with crowded_line(llm):
            stream = await stack.enter_async_context(llm.generate(giving([3] * 90), GREEDY))
            await trio.testing.wait_all_tasks_blocked()
        await read(stream)


@pytest.mark.parametrize("work", [leave_while_an_input_waits, read_what_has_waited])
async def test_cancelling_the_wait_for_room_at_every_checkpoint_leaves_nothing_behind(
    work: Callable[[AsyncLLM], Awaitable[None]], autojump_clock: trio.abc.Clock
) -> None:
    async with open_fake_llm(**CROWDED, step_s=0.1) as fake:
        assert await cancel_at_every_checkpoint(lambda: work(fake.llm), fake.assert_nothing_is_left) >= 4


# ---------------------------------------------------------------------------------------------- ends


class Endless:
    """Inputs of which the last one never comes; knows whether it was closed."""

    def __init__(self, *inputs: list[int]) -> None:
        self._inputs = inputs
        self.was_closed = trio.Event()

    async def __aiter__(self) -> AsyncIterator[StreamingInput]:
        try:
            for one in self._inputs:
                yield StreamingInput(one)
            await trio.sleep_forever()
        finally:
            self.was_closed.set()


async def wait_for_the_first_input(llm: AsyncLLM) -> None:
    async with llm.generate(Endless(), GREEDY) as stream:
        with trio.move_on_after(1):
            await anext(stream)


async def leave_at_once(llm: AsyncLLM) -> None:
    async with llm.generate(Endless([1]), GREEDY):
        pass


async def leave_in_an_answer(llm: AsyncLLM) -> None:
    async with llm.generate(Endless([1]), SamplingParams(max_tokens=1000)) as stream:
        await anext(stream)
        await anext(stream)


async def leave_between_inputs(llm: AsyncLLM) -> None:
    async with llm.generate(Endless([1], [2]), GREEDY) as stream:
        num_answers = 0
        async for output in stream:
            num_answers += output.outputs[0].finish_reason is not None
            if num_answers == 2:
                break
        await trio.testing.wait_all_tasks_blocked()


async def abort_by_id(llm: AsyncLLM) -> None:
    async with llm.generate(Endless([1]), GREEDY, request_id="x") as stream:
        async for output in stream:
            if output.outputs[0].finish_reason == "length":
                llm.abort("x")
        assert output.outputs[0].finish_reason == "abort"
        assert output.finished


async def read_to_the_end(llm: AsyncLLM) -> None:
    async with llm.generate(giving([1], "hello", [3]), GREEDY) as stream:
        assert len(await read(stream)) == 4


async def fail_in_the_iterable(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with llm.generate(giving([1], then=ValueError("mine")), GREEDY) as stream:
            await read(stream)


WORKS = [
    wait_for_the_first_input,
    leave_at_once,
    leave_in_an_answer,
    leave_between_inputs,
    abort_by_id,
    read_to_the_end,
    fail_in_the_iterable,
]


@pytest.mark.parametrize("work", WORKS)
async def test_cancelling_a_session_at_every_checkpoint_leaves_nothing_behind(
    work: Callable[[AsyncLLM], Awaitable[None]], autojump_clock: trio.abc.Clock
) -> None:
    async with open_fake_llm() as fake:
        num_tasks = trio.lowlevel.current_statistics().tasks_living

        async def check() -> None:
            await fake.assert_nothing_is_left()
            await trio.testing.wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().tasks_living == num_tasks, "a feeding task is left"
            assert len(await answer_alone(fake.llm, [1])) == 5

        assert await cancel_at_every_checkpoint(lambda: work(fake.llm), check) >= 2


async def test_leaving_the_stream_closes_an_async_generator_that_waits() -> None:
    inputs = Endless([1])
    async with open_fake_llm() as fake:
        async with fake.llm.generate(inputs, GREEDY) as stream:
            await anext(stream)
            assert not inputs.was_closed.is_set()
        with trio.fail_after(5):
            await inputs.was_closed.wait()


async def test_the_engine_s_death_reaches_the_reader_and_ends_the_feeding() -> None:
    inputs = Endless([1])
    async with open_fake_llm() as fake:
        async with fake.llm.generate(inputs, GREEDY) as stream:
            with pytest.raises(EngineDeadError, match="killed by the test"):
                async for output in stream:
                    if output.outputs[0].finish_reason is not None:
                        fake.llm.kill()
            with trio.fail_after(5):
                await inputs.was_closed.wait()
        await fake.llm.assert_idle()


async def test_leaving_the_block_of_open_llm_ends_the_feeding_and_the_reader() -> None:
    inputs = Endless([1])
    async with open_fake_llm() as fake:
        stream = await fake.llm.generate(inputs, GREEDY).__aenter__()
        await anext(stream)
    assert inputs.was_closed.is_set()
    with pytest.raises(EngineDeadError):
        while True:
            await anext(stream)
    await stream.__aexit__(None, None, None)


async def clumsy() -> AsyncIterator[StreamingInput]:
    """Inputs whose clean-up fails."""

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("clumsy")

    yield StreamingInput([1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        nursery.start_soon(fail_when_cancelled)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_inputs_that_fail_while_the_engine_is_closed_are_told_to_the_log_alone(
    is_cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.CancelScope() as scope:
        async with open_fake_llm() as fake:
            stream = await fake.llm.generate(clumsy(), GREEDY).__aenter__()
            await read_one_answer(stream)
            await trio.testing.wait_all_tasks_blocked()
            if is_cancelled:
                scope.cancel()
    await stream.__aexit__(None, None, None)

    assert "clumsy" in caplog.text


async def test_inputs_that_fail_while_they_are_cancelled_harm_no_other_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(clumsy(), GREEDY) as stream:
            async for output in stream:
                if output.outputs[0].finish_reason is not None:
                    break
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()

        assert "failed when it was over already" in caplog.text
        await fake.assert_nothing_is_left()
        assert len(await answer_alone(fake.llm, [1])) == 5


async def test_the_deadline_does_not_go_with_a_session() -> None:
    sent: list[ToEngine] = []
    async with open_fake_llm() as fake:
        fake.core.on_sent = sent.append
        with trio.fail_after(60):
            async with fake.llm.generate(giving([1]), GREEDY) as stream:
                await read(stream)

    assert [one.deadline_s for one in sent if isinstance(one, EngineCoreRequest)] == [None]


# --------------------------------------------------------------------------------------------- drain


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("num_inputs", [0, 2])
async def test_a_drain_ends_a_session_that_waits_for_input_at_once(num_inputs: int, kind: RequestOutputKind) -> None:
    inputs = Endless(*INPUTS[:num_inputs])
    async with open_fake_llm() as fake:
        async with fake.llm.generate(inputs, SamplingParams(max_tokens=3, output_kind=kind)) as stream:
            for _ in range(num_inputs):
                answer = tokens((await read_one_answer(stream))[-1:])
            await trio.testing.wait_all_tasks_blocked()
            fake.llm.drain()
            fake.llm.drain()
            with trio.fail_after(5):
                await fake.llm.wait_idle()
                await inputs.was_closed.wait()
            [[last]] = await read(stream)

        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        if num_inputs and kind is RequestOutputKind.CUMULATIVE:
            assert tokens([last]) == answer
        assert fake.llm.statistics().num_finished["abort"] == 1
        await fake.assert_nothing_is_left()


async def test_a_drain_lets_an_answer_of_a_session_come_to_its_end_and_asks_for_no_input_more() -> None:
    inputs = Endless([1], [2], [3])
    async with open_fake_llm() as fake:
        async with fake.llm.generate(inputs, GREEDY) as stream:
            first = await anext(stream)
            fake.llm.drain()
            answer, [last] = await read(stream)

        assert len(tokens([first, *answer])) == 5
        assert answer[-1].outputs[0].finish_reason == "length"
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        with trio.fail_after(5):
            await inputs.was_closed.wait()
        await fake.assert_nothing_is_left()


async def drain_between_inputs(llm: AsyncLLM) -> None:
    async with llm.generate(Endless([1]), GREEDY) as stream:
        await read_one_answer(stream)
        llm.drain()
        await read(stream)


async def test_cancelling_a_session_at_every_checkpoint_of_a_drain_leaves_nothing_behind() -> None:
    async with open_fake_llm() as fake:

        async def check() -> None:
            await fake.assert_nothing_is_left()
            fake.llm._submitter.is_draining = False

        assert await cancel_at_every_checkpoint(lambda: drain_between_inputs(fake.llm), check) >= 3
