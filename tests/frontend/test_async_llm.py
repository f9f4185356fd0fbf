"""AsyncLLM over the in-memory engine: requests, their ends, and what is left of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sized

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.fake_llm import open_fake_llm
from tests.support.scripted_core import ScriptedCore
from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.config import EngineConfig
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineStartupError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.open_llm import open_llm_over
from trio_llm.frontend.requests.stream import GenerateStream
from trio_llm.frontend.statistics.stats import IterationStats
from trio_llm.outputs import FinishReason, RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing.answers import LOGITS_WIDTH
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreOutputs, Progress, SchedulerStats

HELLO = list(b"hello")


def params(max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"seed": 1, **fields})  # type: ignore[arg-type]


async def read(stream: GenerateStream) -> list[int]:
    async with stream:
        return [token_id async for output in stream for token_id in output.outputs[0].token_ids]


async def test_a_request_gets_its_tokens_and_ends() -> None:
    async with open_fake_llm() as fake:
        outputs: list[RequestOutput] = []
        async with fake.llm.generate(HELLO, params(), request_id="mine") as stream:
            async for output in stream:
                outputs.append(output)

        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 8
        assert [output.finished for output in outputs][-1]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert {output.request_id for output in outputs} == {"mine"}
        await fake.assert_nothing_is_left()


async def test_requests_beside_each_other_get_what_they_get_alone() -> None:
    async with open_fake_llm() as fake:
        prompts = [[number + 1] * (number + 1) for number in range(20)]
        alone = [await read(fake.llm.generate(prompt, params())) for prompt in prompts]
        together: dict[int, list[int]] = {}

        async def run(number: int) -> None:
            together[number] = await read(fake.llm.generate(prompts[number], params()))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(run, number)

        assert [together[number] for number in range(20)] == alone
        await fake.assert_nothing_is_left()


async def test_a_slow_reader_loses_no_token(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1) as fake:
        fast = await read(fake.llm.generate(HELLO, params(50)))
        slow: list[int] = []
        async with fake.llm.generate(HELLO, params(50)) as stream:
            async for output in stream:
                slow += output.outputs[0].token_ids
                await trio.sleep(1.7)

        assert slow == fast


async def test_a_reader_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_llm.frontend.output_handler._MAX_UNREAD_BYTES", 5000)
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params(1000)) as stream:
            await fake.llm.wait_idle()

            taken = 0
            with pytest.raises(EngineGenerateError, match="not read"):
                async for output in stream:
                    taken += len(output.outputs[0].token_ids)

            assert 0 < taken < 1000
        await fake.assert_nothing_is_left()


async def test_leaving_early_aborts_the_request() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params(1000)) as stream:
            await anext(stream)

        await fake.assert_nothing_is_left()


async def test_an_error_in_the_block_comes_out_as_itself_and_aborts() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(ZeroDivisionError):
            async with fake.llm.generate(HELLO, params(1000)) as stream:
                await anext(stream)
                raise ZeroDivisionError

        await fake.assert_nothing_is_left()


async def test_two_streams_may_be_closed_in_any_order() -> None:
    async with open_fake_llm() as fake:
        first, second = fake.llm.generate(HELLO, params(1000)), fake.llm.generate(HELLO, params(1000))
        await first.__aenter__()
        await second.__aenter__()
        await anext(first)
        await first.__aexit__(None, None, None)
        await anext(second)
        await second.__aexit__(None, None, None)

        await fake.assert_nothing_is_left()


async def test_abort_by_the_callers_id_ends_every_request_of_that_id() -> None:
    async with open_fake_llm() as fake:
        ends: list[str | None] = []

        async def run(request_id: str) -> None:
            async with fake.llm.generate(HELLO, params(2000), request_id=request_id) as stream:
                async for output in stream:
                    if output.finished:
                        ends.append(output.outputs[0].finish_reason)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "x")
            nursery.start_soon(run, "x")
            await wait_all_or_running(fake.llm._registry, 2)
            assert fake.llm.abort("x") == 2

        assert ends == ["abort", "abort"]
        assert fake.llm.abort("x") == 0
        await fake.assert_nothing_is_left()


async def wait_all_or_running(requests: Sized, count: int) -> None:
    """Until so many requests are registered."""
    while len(requests) < count:
        await trio.lowlevel.checkpoint()


async def test_two_requests_of_the_same_id_at_once_both_complete() -> None:
    async with open_fake_llm() as fake:
        async with (
            fake.llm.generate(HELLO, params(), request_id="x") as first,
            fake.llm.generate([1, 2], params(), request_id="x") as second,
        ):
            answers = [[o async for o in stream] for stream in (first, second)]

        assert [outputs[-1].outputs[0].finish_reason for outputs in answers] == ["length", "length"]
        assert [sum(len(o.outputs[0].token_ids) for o in outputs) for outputs in answers] == [8, 8]
        await fake.assert_nothing_is_left()


async def test_an_id_may_be_used_again_right_after_its_abort() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params(1000), request_id="x") as stream:
            await anext(stream)
            fake.llm.abort("x")
            again = await read(fake.llm.generate(HELLO, params(), request_id="x"))

        assert len(again) == 8
        await fake.assert_nothing_is_left()


async def test_a_stream_that_was_not_entered_tells_how_it_is_used() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(RuntimeError, match="async with"):
            async for _ in fake.llm.generate(HELLO, params()):
                pass


async def test_a_stream_that_is_dropped_warns_and_is_aborted() -> None:
    async with open_fake_llm() as fake:
        stream = fake.llm.generate(HELLO, params(2000))
        await stream.__aenter__()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del stream
            gc.collect()

        assert ["dropped" in str(warning.message) for warning in caught] == [True]

        await fake.assert_nothing_is_left()


async def test_a_stream_that_is_collected_in_another_thread_is_aborted_too(
    recwarn: pytest.WarningsRecorder,
) -> None:
    # Slow, or the answer is over before the thread gets its turn.
    async with open_fake_llm(step_s=0.01) as fake:
        streams = [fake.llm.generate(HELLO, params(2000))]
        await streams[0].__aenter__()

        await trio.to_thread.run_sync(streams.clear)

        with trio.fail_after(5):
            await fake.assert_nothing_is_left()
        assert [request.was_aborted for request in fake.llm.requests] == [True]
        assert [warning.category for warning in recwarn] == [ResourceWarning]


async def test_a_second_task_that_reads_a_stream_is_refused_and_the_first_gets_all() -> None:
    async with open_fake_llm() as fake:
        expected = await read(fake.llm.generate(HELLO, params()))
        got: list[int] = []

        async with fake.llm.generate(HELLO, params()) as stream:

            async def read_on() -> None:
                got.extend([token_id async for output in stream for token_id in output.outputs[0].token_ids])

            fake.llm.stall()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_on)
                await wait_all_tasks_blocked()
                for _ in range(2):
                    with trio.fail_after(5), pytest.raises(trio.BusyResourceError):
                        await anext(stream)
                    fake.llm.resume()

        assert got == expected
        await fake.assert_nothing_is_left()


async def test_two_tasks_cannot_enter_a_stream() -> None:
    async with open_fake_llm() as fake:
        stream = fake.llm.generate(HELLO, params())
        num_entered = 0

        async def enter() -> None:
            nonlocal num_entered
            try:
                await stream.__aenter__()
                num_entered += 1
            except RuntimeError:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(enter)
            nursery.start_soon(enter)
        assert num_entered == 1
        await stream.__aexit__(None, None, None)
        with trio.fail_after(5):
            await fake.assert_nothing_is_left()


async def test_a_stream_whose_entering_failed_or_was_cancelled_can_be_entered_again() -> None:
    async with open_fake_llm(max_num_queued_reqs=1) as fake:
        stream = fake.llm.generate(HELLO, params())
        async with fake.llm.generate(HELLO, params(1000)):
            with pytest.raises(QueueFullError):
                await stream.__aenter__()
        await fake.llm.wait_idle()
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.__aenter__()

        assert len(await read(stream)) == 8
        await fake.assert_nothing_is_left()


async def test_a_stream_that_is_left_while_a_task_reads_it_ends_that_and_is_not_left_again(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async with open_fake_llm() as fake, trio.open_nursery() as nursery:
        stream = fake.llm.generate(HELLO, params(1000))
        ended: list[type[BaseException]] = []

        async def read_on(stream: GenerateStream) -> None:
            try:
                while True:
                    await anext(stream)
            except trio.ClosedResourceError as error:
                ended.append(type(error))

        async with stream:
            fake.llm.stall()
            nursery.start_soon(read_on, stream)
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        fake.llm.resume()

        assert ended == [trio.ClosedResourceError]
        with pytest.raises(RuntimeError, match="outside"):
            await anext(stream)
        del stream
        gc.collect()
        assert list(recwarn) == []
        await fake.assert_nothing_is_left()


async def test_a_stream_can_be_entered_once_and_read_only_inside_its_block() -> None:
    async with open_fake_llm() as fake:
        stream = fake.llm.generate(HELLO, params())
        async with stream:
            with pytest.raises(RuntimeError, match="once"):
                await stream.__aenter__()
            await anext(stream)
        with pytest.raises(RuntimeError, match="outside"):
            await anext(stream)


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([LOGITS_WIDTH], {}, "prompt"),
        ([2**63], {}, "prompt"),
        ([True], {}, "prompt"),
        (["a"], {}, "prompt"),
        ("\udc97", {}, "prompt"),
        (HELLO, {"stop_token_ids": (LOGITS_WIDTH,)}, "stop_token_ids"),
        (HELLO, {"max_tokens": 2**40}, "max_tokens"),
    ],
)
async def test_bad_input_is_refused_on_entering_and_leaves_nothing(
    prompt: list[int] | str, fields: dict[str, object], param: str
) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as refused:
            await read(fake.llm.generate(prompt, params(**fields)))  # type: ignore[arg-type]

        assert refused.value.param == param
        await fake.assert_nothing_is_left()
        assert len(await read(fake.llm.generate(HELLO, params()))) == 8


async def test_a_prompt_over_the_model_length_tells_the_numbers() -> None:
    async with open_fake_llm(max_model_len=100) as fake:
        for prompt in ([1] * 100, "a" * 100_000):
            with pytest.raises(PromptTooLongError, match=r"maximum context length is 100\b"):
                await read(fake.llm.generate(prompt, params()))

        longest = await read(fake.llm.generate([1] * 99, SamplingParams()))

        assert len(longest) == 1


async def test_a_faulty_token_fails_its_request_alone() -> None:
    async with open_fake_llm(faulty_token_prompt=7) as fake:
        results: list[list[int]] = []

        async def neighbour() -> None:
            results.append(await read(fake.llm.generate(HELLO, params(50))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(neighbour)
            with pytest.raises(EngineGenerateError, match="-1"):
                await read(fake.llm.generate([7], params()))

        assert len(results[0]) == 50
        await fake.assert_nothing_is_left()


async def test_a_failing_row_fails_its_request_alone() -> None:
    async with open_fake_llm(failing_row_prompt=7) as fake:
        with pytest.raises(EngineGenerateError):
            await read(fake.llm.generate([7], params()))

        assert len(await read(fake.llm.generate(HELLO, params()))) == 8
        await fake.assert_nothing_is_left()


async def test_every_reader_gets_its_text_and_then_the_reason_when_the_engine_dies(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1, fail_at_step=5) as fake:
        ends: list[tuple[int, str]] = []

        async def run() -> None:
            taken = 0
            async with fake.llm.generate(HELLO, params(100)) as stream:
                try:
                    async for output in stream:
                        taken += len(output.outputs[0].token_ids)
                except EngineDeadError as error:
                    ends.append((taken, str(error)))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(run)

        assert len(ends) == 4
        assert {taken for taken, _ in ends} == {4}
        assert len({reason for _, reason in ends}) == 1
        assert fake.llm.errored
        assert fake.llm.status.state == "dead"
        assert fake.llm.status.reason == ends[0][1]
        with pytest.raises(EngineDeadError):
            await read(fake.llm.generate(HELLO, params()))
        with pytest.raises(EngineDeadError):
            await fake.llm.check_health()
        await fake.llm.wait_idle()


@pytest.mark.parametrize("finish_reason", [None, "length"])
async def test_a_gap_in_the_output_ends_the_engine(finish_reason: FinishReason | None) -> None:
    async with open_fake_llm() as fake, fake.llm.generate(HELLO, params(2000)) as stream:
        await anext(stream)
        (internal_id,) = fake.llm._registry.in_flight
        fake.core.inject(
            EngineCoreOutputs(1, 9999, 0.0, [EngineCoreOutput(internal_id, 1999, [1], finish_reason=finish_reason)])
        )

        with pytest.raises(EngineDeadError, match="lost"):
            async for _ in stream:
                pass


async def test_an_engine_far_ahead_of_a_front_end_pauses_and_drops_nothing() -> None:
    async with open_fake_llm() as fake:
        fake.core.core._clients[0]._credit_steps = 3
        fake.llm._engines[0]._sequence.ack_steps = 1

        assert len(await read(fake.llm.generate(HELLO, params(40)))) == 40
        await fake.assert_nothing_is_left()


async def test_draining_refuses_new_requests_and_lets_running_ones_end() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params()) as stream:
            fake.llm.drain()
            with pytest.raises(EngineUnavailableError):
                await read(fake.llm.generate(HELLO, params()))
            assert fake.llm.status.state == "draining"

            assert [output async for output in stream][-1].finished
        await fake.llm.wait_idle()


async def test_health_is_a_round_trip_through_the_engines_loop(autojump_clock: MockClock) -> None:
    async with open_fake_llm() as fake:
        await fake.llm.check_health()

        fake.core.pause()
        with trio.move_on_after(5) as scope:
            await fake.llm.check_health()

        assert scope.cancelled_caught
        assert not fake.llm._engines[0].utilities._waiting


async def test_final_only_gives_one_output_with_everything() -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params(20, output_kind=RequestOutputKind.FINAL_ONLY)) as stream:
            outputs = [output async for output in stream]

        assert len(outputs) == 1
        assert len(outputs[0].outputs[0].token_ids) == 20


async def test_statistics_count_every_token_and_one_end_a_request() -> None:
    recorder = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[recorder], failing_row_prompt=7) as fake:
        await read(fake.llm.generate(HELLO, params(5)))
        with pytest.raises(EngineGenerateError):
            await read(fake.llm.generate([7], params()))
        async with fake.llm.generate(HELLO, params(2000)) as stream:
            await anext(stream)
        await fake.assert_nothing_is_left()

    assert sorted(recorder.reasons) == ["abort", "error", "length"]
    assert 5 + 1 <= recorder.num_tokens < 5 + 2000
    assert recorder.scheduler is not None
    assert (recorder.scheduler.num_running, recorder.scheduler.num_waiting) == (0, 0)


async def test_a_logger_that_raises_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingStatLogger):
        def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
            raise OSError("disk full")

    class BrokenLog(RecordingStatLogger):
        def log(self) -> None:
            raise OSError("disk full")

    healthy = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[Broken(), BrokenLog(), healthy]) as fake:
        fake.llm.do_log_stats()
        await read(fake.llm.generate(HELLO, params(5)))

    assert healthy.num_tokens == 5
    assert caplog.text.count("records no statistics from now on") == 2


async def test_a_reader_outside_the_block_of_open_llm_learns_that_it_was_left(autojump_clock: MockClock) -> None:
    ends: list[str] = []

    async def run(llm: AsyncLLM, started: trio.Event) -> None:
        try:
            async with llm.generate(HELLO, params(2000)) as stream:
                async for _ in stream:
                    started.set()
        except EngineDeadError as error:
            ends.append(str(error))

    async with trio.open_nursery() as outer, open_fake_llm(step_s=0.1) as fake:
        started = trio.Event()
        outer.start_soon(run, fake.llm, started)
        await started.wait()

    assert "was left" in ends[0]
    assert fake.llm.status.state == "dead"
    with pytest.raises(EngineDeadError):
        await read(fake.llm.generate(HELLO, params()))
    with pytest.raises(EngineDeadError):
        await fake.llm.check_health()


async def test_what_needs_a_loaded_model_says_so_while_it_loads() -> None:
    async with open_fake_llm(wait_until_ready=False) as fake:
        for call in (fake.llm.check_health, fake.llm.check_scheduler, fake.llm.generate(HELLO).__aenter__):
            with pytest.raises(EngineUnavailableError, match="loading"):
                await call()
        with pytest.raises(EngineUnavailableError):
            fake.llm.get_supported_tasks()
        states = [fake.llm.status.state]

        await fake.llm.wait_until_ready()

        assert [*states, fake.llm.status.state] == ["loading", "ready"]
        assert fake.llm.get_supported_tasks() == ("generate", "embed", "score")


async def test_many_rows_at_once_leave_room_for_other_tasks() -> None:
    async with open_fake_llm() as fake, fake.llm.generate(HELLO, params(2000)) as stream:
        await anext(stream)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await trio.lowlevel.checkpoint()
            for _ in range(64):  # each smaller than a slice
                rows = [EngineCoreOutput(f"unknown-{n}", 0, [1]) for n in range(64)]
                fake.core.inject(EngineCoreOutputs(1, 0, 0.0, rows))
            before = turns
            await fake.llm.check_health()
            nursery.cancel_scope.cancel()

        assert turns - before >= 64 * 64 // 128


async def test_an_error_in_the_block_of_open_llm_comes_out_as_itself() -> None:
    with pytest.raises(KeyError):
        async with open_fake_llm():
            await wait_all_tasks_blocked()
            raise KeyError("mine")


async def test_abort_gives_the_reader_the_text_that_might_have_become_a_stop_string(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1, script=script_of("xE")) as fake:
        num_tokens, text = 0, ""
        async with fake.llm.generate(HELLO, params(1000, stop=("Ex!",)), request_id="mine") as stream:
            while len(text) == num_tokens:
                output = (await anext(stream)).outputs[0]
                num_tokens, text = num_tokens + len(output.token_ids), text + output.text
            assert fake.llm.abort("mine") == 1

            (last,) = [output async for output in stream]

        assert (last.finished, last.outputs[0].finish_reason, last.outputs[0].token_ids) == (True, "abort", [])
        assert last.outputs[0].text != ""
        assert text + last.outputs[0].text == ("xE" * num_tokens)[:num_tokens]
        await fake.assert_nothing_is_left()


async def test_cumulative_outputs_each_hold_all_so_far(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1, script=script_of("abc")) as fake:
        async with fake.llm.generate(HELLO, params(7, output_kind=RequestOutputKind.CUMULATIVE)) as stream:
            choices = [output.outputs[0] async for output in stream]

        assert [choice.text for choice in choices] == ["a", "ab", "abc", "abca", "abcab", "abcabc", "abcabca"]
        assert [len(choice.token_ids) for choice in choices] == list(range(1, 8))
        assert [choice.finish_reason for choice in choices] == [None] * 6 + ["length"]


def script_of(text: str) -> tuple[int, ...]:
    """The ids of tokens of one letter each."""
    return tuple(text.encode())


async def test_an_engine_that_shows_life_may_take_longer_than_the_limit_and_one_that_stops_may_not(
    autojump_clock: MockClock,
) -> None:
    core = ScriptedCore()
    async with open_llm_over(core, EngineConfig(startup_timeout_s=10), wait_until_ready=False) as llm:
        for done in range(10):
            await trio.sleep(9)
            core.say(Progress(1, "load", done, 10))
        assert (llm.status.state, llm.status.elapsed_s) == ("loading", 90)

        with pytest.raises(EngineStartupError, match="no sign of life for 10 s in phase 'load'"):
            await llm.wait_until_ready()

        assert llm.status.elapsed_s == 100.5  # with a second look
        assert core.kill_reason == llm.status.reason
