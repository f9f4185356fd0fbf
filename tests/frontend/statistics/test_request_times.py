"""Times of requests: queue, prefill, decode and the rest are what a clock beside the fake engine shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats, StatLogger
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing.fake_llm import FakeLLM, open_fake_llm
from trio_llm.wire.messages import SchedulerStats

STEP_S = 0.5


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0, **fields})


class Finished(StatLogger):
    def __init__(self) -> None:
        self.requests: dict[str, list[FinishedRequestStats]] = {}
        self.step_tokens: list[int] = []

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        for request in iteration.finished:
            self.requests.setdefault(request.request_id, []).append(request)
        self.step_tokens += iteration.step_tokens


async def last_output(llm: FakeLLM, prompt: str, request_id: str, wanted: SamplingParams) -> RequestOutput:
    outputs = []
    async with llm.generate(prompt, wanted, request_id=request_id) as stream:
        async for output in stream:
            outputs.append(output)
    assert all(output.metrics is None for output in outputs[:-1]), "only the last one has them"
    return outputs[-1]


async def test_the_times_of_a_request_are_those_of_its_steps(autojump_clock: MockClock) -> None:
    logger = Finished()
    async with (
        open_fake_llm(step_s=STEP_S, max_num_seqs=1, stat_loggers=[logger]) as llm,
        llm.generate("first", params(4), request_id="first"),
        llm.generate("second", params(3), request_id="second") as stream,
    ):
        output = [output async for output in stream][-1]

    [first], [second] = logger.requests["first"], logger.requests["second"]
    # A fake step takes its time after it was computed: a token arrives half a second after its planning.
    assert first.queue_time_s == pytest.approx(0)
    assert first.prefill_time_s == pytest.approx(STEP_S)
    assert first.decode_time_s == pytest.approx(3 * STEP_S)
    assert second.queue_time_s == pytest.approx(3 * STEP_S), "the engine has read it after the first step"
    assert second.prefill_time_s == pytest.approx(STEP_S)
    assert second.decode_time_s == pytest.approx(2 * STEP_S)
    assert second.inference_time_s == pytest.approx(3 * STEP_S)
    assert second.time_per_output_token_s == pytest.approx(STEP_S)
    assert second.e2e_latency_s == pytest.approx(7 * STEP_S)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.queue_time_s == pytest.approx(3 * STEP_S)
    assert metrics.time_to_first_token_s == pytest.approx(5 * STEP_S)
    assert metrics.generation_time_s == pytest.approx(2 * STEP_S)
    assert metrics.total_time_s == pytest.approx(7 * STEP_S)


async def test_whole_answers_and_chats_of_the_library_have_times() -> None:
    async with open_fake_llm(answer="Hi") as llm:
        outputs = [await llm.complete("Once"), await llm.chat([{"role": "user", "content": "Hi"}])]
        async with llm.map(["a", "b"], max_tokens=3) as results:
            outputs += [output async for output in results]

    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.arrival_time > 1_600_000_000, "seconds since 1970"
        assert output.metrics.time_to_first_token_s is not None
        assert output.metrics.time_to_first_token_s <= output.metrics.total_time_s


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_choices_share_their_times_and_the_last_output_has_them(
    kind: RequestOutputKind, autojump_clock: MockClock
) -> None:
    logger = Finished()
    async with open_fake_llm(step_s=STEP_S, stat_loggers=[logger], max_num_seqs=2) as llm:
        wanted = params(3, n=3, temperature=1, seed=1, output_kind=kind)
        output = await last_output(llm, "Once", "r", wanted)

    metrics = output.metrics
    assert metrics is not None
    assert metrics.time_to_first_token_s == pytest.approx(STEP_S), "of the choice that had one first"
    assert metrics.total_time_s == pytest.approx(6 * STEP_S), "of the choice that came last"
    choices = logger.requests["r"]
    assert [choice.queue_time_s for choice in choices] == pytest.approx([0, 0, 3 * STEP_S])
    assert [choice.num_choices for choice in choices] == [None, None, 3], "one answer"
    assert [choice.max_num_output_tokens for choice in choices] == [None, None, 3]


async def test_equal_choices_are_one_request_that_asked_for_several() -> None:
    logger = Finished()
    async with open_fake_llm(stat_loggers=[logger]) as llm:
        output = await last_output(llm, "Once", "r", params(3, n=3))

    [request] = logger.requests["r"]
    assert (request.num_choices, request.max_num_output_tokens) == (3, 3)
    assert output.metrics is not None


async def test_an_aborted_request_has_the_times_that_it_came_to(autojump_clock: MockClock) -> None:
    logger = Finished()
    async with open_fake_llm(step_s=STEP_S, max_num_seqs=1, stat_loggers=[logger]) as llm:
        async with llm.generate("runs", params(100), request_id="runs") as stream:
            for _ in range(3):
                await anext(stream)
            async with llm.generate("waits", params(9), request_id="waits"):
                await trio.sleep(0.2)
        async with llm.generate("on demand", params(100), request_id="on demand") as stream:
            await anext(stream)
            llm.abort("on demand")
            last = await anext(stream)
        await llm.assert_idle()

    [runs], [waits] = logger.requests["runs"], logger.requests["waits"]
    assert runs.decode_time_s == pytest.approx(2 * STEP_S)
    assert runs.num_preemptions is None, "the engine did not end it"
    assert (waits.queue_time_s, waits.prefill_time_s, waits.decode_time_s) == (None, None, None)
    assert last.finished
    assert last.metrics is not None
    assert last.metrics.time_to_first_token_s is not None


async def test_a_request_that_outlives_its_engine_waits_in_the_queue_for_the_next_one(
    autojump_clock: MockClock,
) -> None:
    logger = Finished()
    async with (
        open_fake_llm(step_s=STEP_S, on_engine_death="restart", stat_loggers=[logger]) as llm,
        llm.generate("Once", params(3), request_id="r") as stream,
    ):
        await trio.sleep(STEP_S / 2)
        llm.kill()
        async for _ in stream:
            pass

    [request] = logger.requests["r"]
    assert request.queue_time_s is not None
    assert request.queue_time_s >= STEP_S / 2 + 0.5, "until the second engine had begun"
    assert request.prefill_time_s == pytest.approx(STEP_S)
    assert request.decode_time_s == pytest.approx(2 * STEP_S)


async def test_sessions_have_no_queue_and_vectors_have_no_decode_time() -> None:
    logger = Finished()

    async def inputs() -> Any:
        yield StreamingInput("Once")
        yield StreamingInput("more")

    async with open_fake_llm(answer="Hi", stat_loggers=[logger]) as llm:
        outputs = []
        async with llm.generate(inputs(), params(3), request_id="session") as stream:
            async for output in stream:
                outputs.append(output)
        await llm.encode("Once", request_id="vector")

    [session], [vector] = logger.requests["session"], logger.requests["vector"]
    assert (session.queue_time_s, session.prefill_time_s, session.decode_time_s) == (None, None, None)
    assert outputs[-1].metrics is not None
    assert vector.queue_time_s is not None
    assert vector.inference_time_s == vector.prefill_time_s is not None
    assert (vector.decode_time_s, vector.max_tokens, vector.num_choices) == (None, None, None)


async def test_a_preempted_request_tells_how_often() -> None:
    logger = Finished()
    async with (
        open_fake_llm(stat_loggers=[logger], num_gpu_blocks_override=4, max_model_len=128) as llm,
        llm.generate("a" * 30, params(60), request_id="first"),
        llm.generate("b" * 30, params(60), request_id="second") as stream,
    ):
        async for _ in stream:
            pass

    assert logger.requests["first"][0].num_preemptions == 0
    assert logger.requests["second"][0].num_preemptions == 1


async def test_tokens_of_steps_are_those_of_messages() -> None:
    logger = Finished()
    async with open_fake_llm(stat_loggers=[logger]) as llm:
        await llm.complete([1] * 10, params(4))
        await llm.complete([2] * 10, params(1))

    assert logger.step_tokens == [11, 1, 1, 1, 11]
    assert math.fsum(logger.step_tokens) == 25
