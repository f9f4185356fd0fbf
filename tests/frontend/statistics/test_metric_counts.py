"""MetricsSnapshot: what several front ends count adds up, and nothing that all of them hear counts twice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trio_llm.frontend.statistics.metric_counts import MetricsSnapshot, merge
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats
from trio_llm.wire.messages import ModelConfig, SchedulerStats

MODEL = ModelConfig(
    model_dir="/m",
    max_model_len=300,
    logits_width=256,
    num_blocks=64,
    block_size=32,
    dtype="float32",
    device="cpu",
    eos_token_ids=(2,),
    tasks=("generate",),
    versions={},
)


def finished(e2e_s: float = 1.0) -> FinishedRequestStats:
    return FinishedRequestStats(
        request_id="r",
        finish_reason="stop",
        num_prompt_tokens=7,
        num_cached_tokens=0,
        num_output_tokens=3,
        max_tokens=16,
        e2e_latency_s=e2e_s,
        time_to_first_token_s=0.1,
        num_choices=1,
        max_num_output_tokens=3,
    )


def batch(tokens: int, *, engine_time_s: float = 0.0, requests: Sequence[FinishedRequestStats] = ()) -> IterationStats:
    return IterationStats(num_generation_tokens=tokens, engine_time_s=engine_time_s, finished=list(requests))


def values(snapshots: Sequence[MetricsSnapshot], logger: PrometheusStatLogger) -> dict[str, float]:
    """By sample, with its labels: what `logger` shows together with the others."""
    text = logger.render(others=snapshots)[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"
            )
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_counters_and_histograms_add_up() -> None:
    loggers = [PrometheusStatLogger("m") for _ in range(3)]
    for index, logger in enumerate(loggers):
        logger.record(None, batch(10 * (index + 1), requests=[finished(0.4), finished(100.0)]))
        logger.record(None, batch(1), engine_index=1)
        logger.record_rejection("max_num_queued_reqs")

    shown = values([logger.snapshot() for logger in loggers[1:]], loggers[0])

    assert shown["vllm:generation_tokens_total{engine=0}"] == 60
    assert shown["vllm:generation_tokens_total{engine=1}"] == 3
    assert shown["vllm:request_success_total{engine=0,finished_reason=stop}"] == 6
    assert shown["vllm:e2e_request_latency_seconds_bucket{engine=0,le=0.5}"] == 3
    assert shown["vllm:e2e_request_latency_seconds_count{engine=0}"] == 6
    assert shown["vllm:e2e_request_latency_seconds_sum{engine=0}"] == pytest.approx(301.2)
    assert shown["vllm:admission_rejections_total{reason=max_num_queued_reqs}"] == 3


def test_a_gauge_is_the_newest_word_of_the_engine_whoever_heard_it() -> None:
    first, second = PrometheusStatLogger("m"), PrometheusStatLogger("m")
    first.record(SchedulerStats(num_running=9, num_blocks=4), batch(0, engine_time_s=20.0))
    second.record(SchedulerStats(num_running=5, num_blocks=4), batch(0, engine_time_s=30.0))
    first.record(SchedulerStats(num_running=1, num_blocks=4), batch(0, engine_time_s=25.0), engine_index=1)

    shown = values([second.snapshot()], first)

    assert shown["vllm:num_requests_running{engine=0}"] == 5
    assert shown["vllm:num_requests_running{engine=1}"] == 1


def test_preemptions_and_restarts_that_all_hear_of_count_once() -> None:
    first, second = PrometheusStatLogger("m"), PrometheusStatLogger("m")
    for logger, heard in ((first, (2, 5)), (second, (2, 5, 6))):
        for count in heard:
            logger.record(SchedulerStats(num_preempted=count), IterationStats())
        logger.record(None, IterationStats(num_restarts=1))

    shown = values([second.snapshot()], first)

    assert shown["vllm:num_preemptions_total{engine=0}"] == 6
    assert shown["trio_llm:engine_restarts_total{engine=0}"] == 1


def test_http_requests_and_operations_add_up() -> None:
    first, second = PrometheusStatLogger("m"), PrometheusStatLogger("m")
    for logger, handler, status in ((first, "/a", 200), (second, "/a", 404), (second, "/b", 200), (second, "/a", 201)):
        logger.record_http(
            handler=handler, method="POST", status=status, seconds=0.2, request_bytes=10, response_bytes=None
        )
    second.record_operation("sleep", None)
    first.record_operation("sleep", None)
    first.record_operation("sleep", 1.0)

    shown = values([second.snapshot()], first)

    assert shown["http_requests_total{handler=/a,method=POST,status=2xx}"] == 2
    assert shown["http_requests_total{handler=/a,method=POST,status=4xx}"] == 1
    assert shown["http_requests_total{handler=/b,method=POST,status=2xx}"] == 1
    assert shown["http_request_size_bytes_sum{handler=/a}"] == 30
    assert shown["http_request_duration_highr_seconds_count{}"] == 4
    assert shown["http_request_duration_seconds_count{handler=/a,method=POST}"] == 3
    assert shown["vllm:sleep_mode_operations_in_flight{operation=sleep}"] == 1
    assert shown["vllm:sleep_mode_operation_duration_seconds_count{operation=sleep}"] == 1


def test_the_description_of_the_cache_is_that_of_whoever_has_it() -> None:
    first, second = PrometheusStatLogger("m"), PrometheusStatLogger("m")
    second.record_engine_ready(MODEL, engine_index=0)

    shown = values([second.snapshot()], first)

    assert shown["vllm:cache_config_info{block_size=32,cache_dtype=float32,engine=0,num_gpu_blocks=64}"] == 1


def test_a_front_end_that_does_not_know_the_length_of_the_model_yet_disturbs_nothing() -> None:
    loading, ready = PrometheusStatLogger("m"), PrometheusStatLogger("m")
    ready.record_engine_ready(MODEL, engine_index=0)
    ready.record(None, batch(1, requests=[finished()]))

    shown = values([ready.snapshot()], loading)

    bounds = [name for name in shown if name.startswith("vllm:request_prompt_tokens_bucket")]
    assert len(bounds) == len(["1", "2", "5", "10", "20", "50", "100", "200", "+Inf"])


def test_front_ends_of_other_models_do_not_add_up() -> None:
    first, second = (PrometheusStatLogger("m", max_model_len=length) for length in (100, 1000))
    for logger in (first, second):
        logger.record(None, batch(1, requests=[finished()]))

    with pytest.raises(ValueError, match="other buckets"):
        merge([first.snapshot(), second.snapshot()])


def test_one_snapshot_merged_is_itself_and_order_does_not_matter() -> None:
    loggers = [PrometheusStatLogger("m") for _ in range(2)]
    for index, logger in enumerate(loggers):
        logger.record(SchedulerStats(num_running=index), batch(index + 3, engine_time_s=index, requests=[finished()]))
    one, two = (logger.snapshot() for logger in loggers)

    assert merge([one]) == one
    assert merge([one, two]) == merge([two, one])
    assert merge([merge([one, two]), one]) == merge([one, two, one])


def test_a_snapshot_crosses_a_process_line_and_changes_no_more() -> None:
    logger = PrometheusStatLogger("m")
    logger.record(SchedulerStats(num_running=1), batch(3, requests=[finished()]))
    logger.record_http(handler="/a", method="GET", status=200, seconds=0.2, request_bytes=0, response_bytes=5)

    snapshot = logger.snapshot()
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=MetricsSnapshot)
    logger.record(None, batch(100, requests=[finished()]))

    assert received == snapshot
    assert snapshot.engines[0].counters["generation_tokens"] == 3
