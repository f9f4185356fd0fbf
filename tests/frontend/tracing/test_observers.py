"""Which observers a configuration makes, what it costs if there are none, and the way of spans to a collector."""

from __future__ import annotations

import logging
import subprocess
import sys

import httpx
import pytest
import trio

from tests.support.asking import ask
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import BOUND_S
from tests.support.spans import ENDPOINT, PARENT_ID, TRACE_HEADERS, TRACE_ID, RecordedSpans, open_collector
from trio_llm.config import EngineConfig, default_model_name, traces_endpoint
from trio_llm.errors import ConfigError
from trio_llm.frontend.tracing.observers import check_tracing
from trio_llm.sampling import SamplingParams
from trio_llm.testing import open_test_server
from trio_llm.testing.fake_llm import open_fake_llm as open_plain_fake_llm

HELLO = list(b"hello")
VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PARAMS = SamplingParams(max_tokens=3, seed=1)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)


# ------------------------------------------------------------------------------------------ endpoints


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/v1/traces", "https://collector.example/v1/traces"),
        ("https://collector.example/elsewhere?key=1", "https://collector.example/elsewhere?key=1"),
    ],
)
def test_the_endpoint_is_the_fields_or_the_environments(
    url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traces_endpoint(EngineConfig()) is None
    assert traces_endpoint(EngineConfig(otlp_traces_endpoint=url)) == endpoint

    monkeypatch.setenv(VARIABLE, url)
    assert traces_endpoint(EngineConfig()) == endpoint
    assert traces_endpoint(EngineConfig(otlp_traces_endpoint=ENDPOINT)) == ENDPOINT

    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces_endpoint(EngineConfig(otlp_traces_endpoint=url)) is None


@pytest.mark.parametrize("url", ["", "127.0.0.1:4318", "grpc://me:secret@127.0.0.1:4317", "http://", "http://a:99999/"])
def test_what_is_no_url_is_refused_by_the_name_of_its_setting_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL such as") as caught:
        EngineConfig(otlp_traces_endpoint=url)
    assert "secret" not in str(caught.value)

    if url:  # an empty variable is none
        monkeypatch.setenv(VARIABLE, url)
        with pytest.raises(ConfigError, match=f"{VARIABLE} must be a URL such as"):
            traces_endpoint(EngineConfig())


def test_a_model_is_named_after_its_directory(tmp_path: object) -> None:
    assert default_model_name(EngineConfig(model=str(tmp_path))) == str(tmp_path).rpartition("/")[2]


# -------------------------------------------------------------------------------------- without traces


async def test_without_an_endpoint_trace_headers_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with open_fake_llm() as fake:
        await ask(fake.llm, HELLO, PARAMS)
        assert "trace headers" not in caplog.text
        for _ in range(3):
            await ask(fake.llm, HELLO, PARAMS, trace_headers=TRACE_HEADERS)

        assert fake.llm.is_tracing_enabled() is False
    assert [line for line in caplog.messages if "--otlp-traces-endpoint" in line] == [
        "a request came with trace headers, but no traces are sent; set --otlp-traces-endpoint"
    ]


def test_without_an_endpoint_opentelemetry_is_not_loaded() -> None:
    code = f"""
import sys, trio
from trio_llm.frontend.http import routes, serve
from trio_llm.testing import open_fake_llm

async def main():
    async with open_fake_llm(answer="Hi") as llm:
        async with llm.generate("Hello", trace_headers={TRACE_HEADERS!r}) as stream:
            async for _ in stream: pass

trio.run(main)
print([name for name in sys.modules if name.startswith(("opentelemetry", "google"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


async def test_an_endpoint_without_opentelemetry_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "trio_llm.frontend.tracing.tracer", None)

    with pytest.raises(ConfigError, match=r"pip install 'trio-llm\[otel\]'"):
        async with open_fake_llm(engine={"otlp_traces_endpoint": ENDPOINT}):
            pass
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        check_tracing(EngineConfig(otlp_traces_endpoint=ENDPOINT))
    check_tracing(EngineConfig())


# ----------------------------------------------------------------------------------------- with traces


async def test_a_collector_gets_the_spans_of_http_requests_at_the_latest_when_the_block_is_left() -> None:
    with open_collector() as collector, trio.fail_after(BOUND_S):
        async with (
            open_plain_fake_llm(answer="Hi", otlp_traces_endpoint=collector.url) as llm,
            open_test_server(llm) as url,
            httpx.AsyncClient(base_url=url, headers=TRACE_HEADERS) as client,
        ):
            assert llm.is_tracing_enabled() is True
            body = {"model": "fake", "prompt": "Hello", "request_id": "mine"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            chat = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
            assert (await client.post("/v1/embeddings", json={"model": "fake", "input": "Hello"})).status_code == 200

    requests = [span for span in collector.spans if span.name == "llm_request"]
    assert [int.from_bytes(span.trace_id) for span in requests] == [TRACE_ID] * 3
    assert [int.from_bytes(span.parent_span_id) for span in requests] == [PARENT_ID] * 3
    assert requests[0].trace_state == "vendor=value"
    texts = {one.key: one.value.string_value for one in requests[0].attributes}
    assert texts["gen_ai.request.id"].startswith("mine")
    assert "load_model" in {span.name for span in collector.spans}
    assert collector.paths == {"/v1/traces"}
    assert collector.content_types == {"application/x-protobuf"}


async def test_a_collector_that_does_not_answer_holds_the_end_up_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trio_llm.frontend.tracing.tracer._FLUSH_S", 0.05)
    with open_collector(is_silent=True) as collector:
        with trio.fail_after(BOUND_S):
            async with open_fake_llm(engine={"otlp_traces_endpoint": collector.url}) as fake:
                await ask(fake.llm, HELLO, PARAMS)

        assert "the last spans are lost" in caplog.text


async def test_a_cancelled_program_sends_its_last_spans_all_the_same() -> None:
    with open_collector() as collector, trio.fail_after(BOUND_S):
        with trio.CancelScope() as scope:
            async with open_fake_llm(engine={"otlp_traces_endpoint": collector.url}) as fake:
                await ask(fake.llm, HELLO, PARAMS)
                scope.cancel()
                await trio.sleep_forever()

        assert [span.name for span in collector.spans] == ["load_model", "llm_request"]


async def test_the_headers_of_http_reach_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = RecordedSpans(monkeypatch)
    async with (
        open_plain_fake_llm(answer="Hi", otlp_traces_endpoint=ENDPOINT) as llm,
        open_test_server(llm) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        parent = ("TraceParent", TRACE_HEADERS["traceparent"])
        for headers in ([parent, ("tracestate", "a=1"), ("tracestate", "b=2")], [parent], [("tracestate", "a=1")]):
            reply = await client.post("/v1/completions", json={"model": "fake", "prompt": "Hello"}, headers=headers)
            assert reply.status_code == 200

    several, one, none = spans.requests
    assert several.context is not None
    assert dict(several.context.trace_state) == {"a": "1", "b": "2"}
    assert one.parent is not None
    assert one.parent.span_id == PARENT_ID
    assert none.parent is None


async def test_the_logger_of_the_end_is_quiet_when_all_went_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_llm.frontend.tracing")
    with open_collector() as collector:
        async with open_fake_llm(engine={"otlp_traces_endpoint": collector.url}) as fake:
            await ask(fake.llm, HELLO, PARAMS)

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
