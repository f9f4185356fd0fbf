"""SpanTracer: one span per request, however the request ends, and what stands in it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
import trio
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from tests.support.asking import ask
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from tests.support.spans import ENDPOINT, PARENT_ID, TRACE_HEADERS, TRACE_ID, RecordedSpans
from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.errors import EngineDeadError, EngineGenerateError, InvalidRequestError, QueueFullError
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams

HELLO = list(b"hello")
TRACED = {"otlp_traces_endpoint": ENDPOINT}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> RecordedSpans:
    return RecordedSpans(monkeypatch)


def params(max_tokens: int = 3, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, **fields)  # type: ignore[arg-type]


LATENCIES = (
    "time_to_first_token",
    "e2e",
    "time_in_queue",
    "time_in_model_prefill",
    "time_in_model_decode",
    "time_in_model_inference",
)


def latencies_of(span: ReadableSpan, names: Sequence[str] = LATENCIES) -> list[float]:
    """In seconds."""
    found = [(span.attributes or {})[f"gen_ai.latency.{name}"] for name in names]
    assert all(isinstance(value, float) for value in found)
    return [float(str(value)) for value in found]


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_span_says_what_was_asked_what_came_and_how_long_it_took(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await ask(fake.llm, HELLO, params(temperature=0.5, top_p=0.9), request_id="mine", trace_headers=TRACE_HEADERS)

        [span] = spans.requests
        attributes = dict(span.attributes or {})
        latencies = {name: attributes.pop(name) for name in list(attributes) if "latency" in name}
        assert attributes == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "trio_llm",
            "gen_ai.request.model": "SmolLM2-135M-Instruct",
            "gen_ai.response.model": "SmolLM2-135M-Instruct",
            "gen_ai.request.id": "mine",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.n": 1,
            "gen_ai.request.choice.count": 1,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.prompt_tokens": 5,
            "gen_ai.usage.input_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.completion_tokens": 3,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.num_sequences": 1,
        }
        assert set(latencies) == {f"gen_ai.latency.{name}" for name in LATENCIES}
        first_token_s, e2e_s, queue_s, prefill_s, decode_s, inference_s = latencies_of(span)
        assert 0 < first_token_s <= e2e_s
        assert 0 <= queue_s + prefill_s <= first_token_s + 1e-6
        assert 0 < first_token_s + decode_s <= e2e_s + 1e-6
        assert inference_s == prefill_s + decode_s
        assert duration_s(span) == pytest.approx(e2e_s, abs=1e-6)
        assert span.kind is SpanKind.SERVER
        assert span.status.status_code is StatusCode.UNSET
        assert span.resource.attributes["service.name"] == "trio-llm"


# ----------------------------------------------------------------------------------------- the parent


async def test_the_parent_is_the_span_that_the_headers_name(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        upper = {name.upper(): value for name, value in TRACE_HEADERS.items()}
        for headers in (TRACE_HEADERS, {**upper, "X-Other": "1"}):
            await ask(fake.llm, HELLO, params(), trace_headers=headers)

    for span in spans.requests:
        assert span.context is not None
        assert span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)
        assert span.context.trace_state.get("vendor") == "value"
    assert len(spans.requests) == 2


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "nonsense"}, {"tracestate": "vendor=value"}, {"traceparent": ""}]
)
async def test_without_headers_that_can_be_read_a_trace_begins(
    spans: RecordedSpans, headers: dict[str, str] | None
) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await ask(fake.llm, HELLO, params(), trace_headers=headers)

    [span] = spans.requests
    assert span.parent is None


async def test_without_headers_the_parent_is_the_callers_own_span(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        own = TracerProvider(shutdown_on_exit=False).get_tracer("program").start_span("own")
        token = otel_context.attach(set_span_in_context(own))
        try:
            await ask(fake.llm, HELLO, params())
            await ask(fake.llm, HELLO, params(), trace_headers=TRACE_HEADERS)
        finally:
            otel_context.detach(token)

    alone, named = spans.requests
    assert alone.parent == own.get_span_context()
    assert named.parent is not None
    assert named.parent.span_id == PARENT_ID


@pytest.mark.parametrize("headers", ["traceparent", [("traceparent", "x")], {"traceparent": b"x"}, {1: "x"}])
async def test_headers_that_are_no_mapping_of_texts_are_refused(headers: object) -> None:
    async with open_fake_llm() as fake:
        for call in (ask(fake.llm, HELLO, params(), trace_headers=headers), encode(fake, headers)):
            with pytest.raises(InvalidRequestError) as caught:
                await call
            assert caught.value.param == "trace_headers"


async def encode(fake: FakeSetUp, headers: object) -> None:
    await fake.llm.encode(HELLO, trace_headers=headers)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- the end


async def finish(fake: FakeSetUp) -> None:
    await ask(fake.llm, HELLO, params())


async def leave_early(fake: FakeSetUp) -> None:
    async with fake.llm.generate(HELLO, params(1000)) as stream:
        await anext(stream)


async def leave_at_once(fake: FakeSetUp) -> None:
    async with fake.llm.generate(HELLO, params(1000)):
        pass


async def be_aborted(fake: FakeSetUp) -> None:
    async with fake.llm.generate(HELLO, params(1000), request_id="mine") as stream:
        await anext(stream)
        fake.llm.abort("mine")
        async for _ in stream:
            pass


async def be_cancelled(fake: FakeSetUp) -> None:
    with trio.CancelScope() as scope:
        async with fake.llm.generate(HELLO, params(1000)) as stream:
            await anext(stream)
            scope.cancel()
            await anext(stream)


async def fail(fake: FakeSetUp) -> None:
    fake.llm.fail_next_row("this row is broken")
    with pytest.raises(EngineGenerateError):
        await ask(fake.llm, HELLO, params())


async def lose_the_engine(fake: FakeSetUp) -> None:
    with pytest.raises(EngineDeadError):
        async with fake.llm.generate(HELLO, params(1000)) as stream:
            await anext(stream)
            fake.llm.kill("lost its device")
            async for _ in stream:
                pass


async def end_a_session(fake: FakeSetUp) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        for _ in range(3):
            yield StreamingInput(HELLO)

    await ask(fake.llm, inputs(), params(2))


async def break_a_session(fake: FakeSetUp) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(HELLO)
        raise OSError("the microphone is gone")

    with pytest.raises(OSError, match="microphone"):
        await ask(fake.llm, inputs(), params(2))


@pytest.mark.parametrize(
    ("way", "reasons", "error"),
    [
        (finish, ("length",), None),
        (leave_early, ("abort",), None),
        (leave_at_once, ("abort",), None),
        (be_aborted, ("abort",), None),
        (be_cancelled, ("abort",), None),
        (fail, ("error",), "EngineGenerateError: this row is broken"),
        (lose_the_engine, ("error",), "EngineDeadError: "),
        (end_a_session, ("length",), None),
        (break_a_session, ("error",), "OSError: the microphone is gone"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_each_end_of_a_request_is_the_end_of_one_span(
    spans: RecordedSpans, way: Callable[[FakeSetUp], Awaitable[None]], reasons: tuple[str, ...], error: str | None
) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await way(fake)
        await fake.llm.wait_idle()

    [span] = spans.requests
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == reasons
    if error is None:
        assert span.status.status_code is StatusCode.UNSET
        assert "error.type" not in span.attributes
    else:
        assert span.status.status_code is StatusCode.ERROR
        assert (span.status.description or "").startswith(error)
        assert span.attributes["error.type"] == error.partition(":")[0]


async def test_the_end_of_the_block_ends_the_spans_of_what_still_runs(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        stream = fake.llm.generate(HELLO, params(1000))
        await stream.__aenter__()
        assert spans.requests == []

    assert [span.status.status_code for span in spans.requests] == [StatusCode.ERROR]
    await stream.__aexit__(None, None, None)
    assert len(spans.requests) == 1


async def test_choices_of_an_answer_are_one_span(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await ask(fake.llm, HELLO, params(4, n=3))
        await fake.llm.wait_idle()

    [span] = spans.requests
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 5
    assert span.attributes["gen_ai.usage.completion_tokens"] == 12
    assert span.attributes["gen_ai.request.n"] == 3


async def test_times_in_the_engine_are_those_of_the_queue_and_of_the_steps(
    spans: RecordedSpans, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fake_llm(engine={**TRACED, "max_num_seqs": 1}, step_s=0.1) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, fake.llm, HELLO, params(10))
            await trio.testing.wait_all_tasks_blocked()
            await ask(fake.llm, HELLO, params(5, n=2))
        await fake.llm.wait_idle()

    alone, behind = spans.requests
    first_token_s, e2e_s, queue_s, prefill_s, decode_s, inference_s = latencies_of(alone)
    assert queue_s == pytest.approx(0.0, abs=0.11)
    assert decode_s == pytest.approx(0.9, abs=0.11), "the first token comes with the prompt, each other takes a step"
    assert first_token_s == pytest.approx(queue_s + prefill_s, abs=0.21)

    first_token_s, e2e_s, queue_s, prefill_s, decode_s, inference_s = latencies_of(behind)
    assert queue_s == pytest.approx(1.0, abs=0.21), "the other request has the one place"
    assert first_token_s == pytest.approx(queue_s + prefill_s, abs=0.21)
    assert decode_s == pytest.approx(0.9, abs=0.11), "one choice after the other, to the last token of the last one"
    assert inference_s == pytest.approx(prefill_s + decode_s)
    assert e2e_s == pytest.approx(first_token_s + decode_s, abs=0.11)


async def test_without_statistics_a_span_has_all_but_the_time_of_its_last_token(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine={**TRACED, "disable_log_stats": True}) as fake:
        await ask(fake.llm, HELLO, params())

    [span] = spans.requests
    latencies_of(span, ["time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill"])
    assert span.attributes is not None
    assert "gen_ai.latency.time_in_model_decode" not in span.attributes
    assert span.attributes["gen_ai.usage.completion_tokens"] == 3


async def test_a_vector_has_a_span_without_parameters_of_sampling(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await fake.llm.encode(HELLO, PoolingParams(), request_id="v", trace_headers=TRACE_HEADERS)
        await fake.llm.wait_idle()

    [span] = spans.requests
    assert span.attributes is not None
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.usage.input_tokens"] == 5
    assert "gen_ai.request.temperature" not in span.attributes
    assert "gen_ai.latency.time_to_first_token" not in span.attributes
    prefill_s, inference_s = latencies_of(span, ["time_in_model_prefill", "time_in_model_inference"])
    assert prefill_s == inference_s
    assert span.parent is not None
    assert span.parent.span_id == PARENT_ID


async def test_a_request_that_is_refused_has_no_span(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine={**TRACED, "max_num_queued_reqs": 1}) as fake:
        async with fake.llm.generate(HELLO, params(1000)):
            with pytest.raises(QueueFullError):
                await ask(fake.llm, HELLO, params())
        with pytest.raises(InvalidRequestError):
            await ask(fake.llm, [], params())
        await fake.llm.wait_idle()

    assert len(spans.requests) == 1


async def test_a_request_that_outlives_an_engine_is_one_span_and_each_start_is_one(
    spans: RecordedSpans, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fake_llm(engine={**TRACED, "on_engine_death": "restart"}, step_s=0.1) as fake:
        async with fake.llm.generate(HELLO, params(8)) as stream:
            await anext(stream)
            fake.llm.kill("lost its device")
            async for _ in stream:
                pass
        await fake.llm.wait_idle()

    [span] = spans.requests
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.completion_tokens"] == 8
    assert span.status.status_code is StatusCode.UNSET
    restarts = [dict(load.attributes or {})["trio_llm.num_restarts"] for load in spans.loads]
    assert restarts == [0, 1]
    assert duration_s(spans.loads[1]) >= 0.5, "the back-off before a restart is part of it"


# --------------------------------------------------------------------------------------- arrival_time


async def test_a_request_that_has_waited_elsewhere_counts_from_its_arrival(spans: RecordedSpans) -> None:
    recorder = RecordingStatLogger()
    async with open_fake_llm(engine=TRACED, stat_loggers=[recorder]) as fake:
        arrived = time.time() - 100
        await ask(fake.llm, HELLO, params(), arrival_time=arrived)
        await fake.llm.encode(HELLO, arrival_time=arrived)
        await fake.llm.wait_idle()

    for span in spans.requests:
        assert span.start_time is not None
        assert abs(span.start_time / 1e9 - arrived) < 1, "a clock may be set between the two"
        assert duration_s(span) >= 100
    assert spans.requests[0].attributes is not None
    first_token_s = spans.requests[0].attributes["gen_ai.latency.time_to_first_token"]
    assert isinstance(first_token_s, float)
    assert first_token_s >= 100
    assert len(spans.requests) == 2
    assert [latency_s >= 100 for latency_s in recorder.e2e_latencies_s] == [True, True]


async def test_a_time_to_come_is_now(spans: RecordedSpans) -> None:
    async with open_fake_llm(engine=TRACED) as fake:
        await ask(fake.llm, HELLO, params(), arrival_time=time.time() + 1000)

    assert duration_s(spans.requests[0]) >= 0


@pytest.mark.parametrize("value", ["now", True, float("nan"), float("inf"), -1, 10**30])
async def test_what_is_no_time_is_refused(value: object) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as caught:
            await ask(fake.llm, HELLO, params(), arrival_time=value)
        assert caught.value.param == "arrival_time"


# ------------------------------------------------------------------------------------ not in the way


async def test_a_tracer_that_fails_is_left_out_and_requests_go_on(
    spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_to_export(spans: object) -> None:
        raise ValueError("no attribute for that")

    async with open_fake_llm(engine=TRACED) as fake:
        assert fake.llm.is_tracing_enabled() is True
        monkeypatch.setattr("trio_llm.frontend.tracing.tracer.request_attributes", fail_to_export)
        for _ in range(2):
            await ask(fake.llm, HELLO, params())

        assert fake.llm.is_tracing_enabled() is False
        assert sum("observes no requests from now on" in line for line in caplog.messages) == 1
        await fake.assert_nothing_is_left()
    assert spans.requests == []


async def test_the_service_may_be_named_by_the_environment(
    spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    async with open_fake_llm(engine=TRACED) as fake:
        await ask(fake.llm, HELLO, params())

    assert spans.requests[0].resource.attributes["service.name"] == "my-service"
