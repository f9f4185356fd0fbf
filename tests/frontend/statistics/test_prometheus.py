"""PrometheusStatLogger: names, values and formats of its series."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.frontend.statistics.stats import FinishedRequestStats, IterationStats, StatLogger
from trio_llm.outputs import FinishReason
from trio_llm.version import __version__
from trio_llm.wire.messages import SchedulerStats

LABELS = {"model_name": "tiny", "engine": "0"}
WITHOUT_MODEL_NAME = (
    "vllm:cache_config_info",
    "vllm:sleep_mode_operation_duration_seconds",
    "vllm:sleep_mode_operations_in_flight",
)


def samples(logger: PrometheusStatLogger) -> dict[tuple[str, str], float]:
    """(name, the label beyond model and engine, if any) -> value."""
    body, _ = logger.render()
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name == "vllm:admission_rejections":
                assert labels["model_name"] == LABELS["model_name"]
            elif family.name in WITHOUT_MODEL_NAME:
                assert "model_name" not in labels
            elif family.name.startswith("vllm:"):
                assert LABELS.items() <= labels.items(), sample
            rest = [value for name, value in labels.items() if name not in LABELS]
            found[sample.name, rest[0] if rest else ""] = sample.value
    return found


def finished(reason: FinishReason, *, prompt: int = 7, output: int = 3, latency_s: float = 0.4) -> FinishedRequestStats:
    return FinishedRequestStats(
        request_id="r",
        finish_reason=reason,
        num_prompt_tokens=prompt,
        num_cached_tokens=0,
        num_output_tokens=output,
        max_tokens=16,
        e2e_latency_s=latency_s,
        time_to_first_token_s=0.1,
    )


def test_before_anything_happens_every_series_is_there_and_zero() -> None:
    logger: StatLogger = PrometheusStatLogger("tiny")
    assert isinstance(logger, PrometheusStatLogger)

    values = samples(logger)

    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert values[f"vllm:{name}", ""] == 0
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "prompt_tokens_cached",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
    ):
        assert values[f"vllm:{name}_total", ""] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert values["vllm:request_success_total", reason] == 0
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        assert values["vllm:admission_rejections_total", reason] == 0
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert values[f"vllm:{name}_count", ""] == 0
    assert values["trio_llm_build_info", __version__] == 1


def test_gauges_show_the_newest_state_of_the_scheduler() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(SchedulerStats(num_running=3, num_waiting=2, num_free_blocks=25, num_blocks=100), IterationStats())
    assert samples(logger)["vllm:kv_cache_usage_perc", ""] == 0.75

    logger.record(SchedulerStats(num_free_blocks=100, num_blocks=100), IterationStats())

    values = samples(logger)
    assert values["vllm:num_requests_running", ""] == 0
    assert values["vllm:kv_cache_usage_perc", ""] == 0


def test_a_batch_without_scheduler_statistics_leaves_the_gauges() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(SchedulerStats(num_running=3, num_blocks=1), IterationStats())

    logger.record(None, IterationStats(num_generation_tokens=1))

    assert samples(logger)["vllm:num_requests_running", ""] == 3


def test_preemptions_do_not_fall_when_the_engine_starts_again() -> None:
    logger = PrometheusStatLogger("tiny")
    for count in (2, 5, 0, 1):
        logger.record(SchedulerStats(num_preempted=count), IterationStats())

    assert samples(logger)["vllm:num_preemptions_total", ""] == 6


def test_buckets_are_cumulative_and_a_value_on_a_bound_is_inside() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(None, IterationStats(inter_token_latency_s=[0.01, 0.011, 0.025, 999.0]))

    values = samples(logger)

    assert values["vllm:inter_token_latency_seconds_bucket", "0.01"] == 1
    assert values["vllm:inter_token_latency_seconds_bucket", "0.025"] == 3
    assert values["vllm:inter_token_latency_seconds_bucket", "80.0"] == 3
    assert values["vllm:inter_token_latency_seconds_bucket", "+Inf"] == 4
    assert values["vllm:inter_token_latency_seconds_count", ""] == 4
    assert values["vllm:inter_token_latency_seconds_sum", ""] == 0.01 + 0.011 + 0.025 + 999.0


def test_each_end_is_counted_once_with_its_reason_and_sizes() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(None, IterationStats(finished=[finished("stop"), finished("abort", prompt=200, output=0)]))

    values = samples(logger)

    assert values["vllm:request_success_total", "stop"] == 1
    assert values["vllm:request_success_total", "abort"] == 1
    assert values["vllm:request_prompt_tokens_bucket", "10.0"] == 1
    assert values["vllm:request_prompt_tokens_bucket", "200.0"] == 2
    assert values["vllm:request_generation_tokens_sum", ""] == 3
    assert values["vllm:e2e_request_latency_seconds_count", ""] == 2


def test_token_counters_add_up() -> None:
    logger = PrometheusStatLogger("tiny")
    for _ in range(2):
        logger.record(
            None,
            IterationStats(num_prompt_tokens=7, num_queried_tokens=6, num_cached_tokens=4, num_generation_tokens=3),
        )

    values = samples(logger)

    assert values["vllm:prompt_tokens_total", ""] == 14
    assert values["vllm:prompt_tokens_cached_total", ""] == 8
    assert values["vllm:prefix_cache_queries_total", ""] == 12
    assert values["vllm:prefix_cache_hits_total", ""] == 8
    assert values["vllm:generation_tokens_total", ""] == 6


def test_the_format_is_plain_text_unless_open_metrics_is_asked_for() -> None:
    logger = PrometheusStatLogger("tiny")

    _, plain = logger.render("*/*")
    body, open_metrics = logger.render("application/openmetrics-text; version=1.0.0")

    assert plain.startswith("text/plain; version=0.0.4")
    assert open_metrics.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_size_buckets_end_at_the_length_of_the_model() -> None:
    logger = PrometheusStatLogger("tiny", max_model_len=300)

    bounds = [bound for name, bound in samples(logger) if name == "vllm:request_prompt_tokens_bucket"]

    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]


def test_refusals_are_counted_by_reason() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record_rejection("max_num_queued_reqs")
    logger.record_rejection("max_num_queued_reqs")
    logger.record_rejection("max_num_queued_tokens")

    values = samples(logger)

    assert values["vllm:admission_rejections_total", "max_num_queued_reqs"] == 2
    assert values["vllm:admission_rejections_total", "max_num_queued_tokens"] == 1


def test_each_engine_has_series_of_its_own() -> None:
    logger = PrometheusStatLogger("m")
    logger.record(SchedulerStats(num_running=3), IterationStats(num_generation_tokens=5), engine_index=0)
    logger.record(SchedulerStats(num_running=1), IterationStats(num_generation_tokens=7), engine_index=1)

    text = logger.render()[0].decode()

    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 5.0',
        'vllm:generation_tokens_total{engine="1",model_name="m"} 7.0',
    ):
        assert line in text.splitlines()


def test_without_statistics_of_engines_there_is_no_series_of_them_and_one_says_so() -> None:
    logger = PrometheusStatLogger("tiny", has_engine_stats=False)
    logger.record_http(handler="/a", method="GET", status=200, seconds=0.1, request_bytes=0, response_bytes=2)

    families = {family.name for family in text_string_to_metric_families(logger.render()[0].decode())}

    assert not any(name.startswith(("vllm:", "trio_llm:")) for name in families)
    assert samples(logger)["trio_llm_engine_statistics", ""] == 0
    assert samples(logger)["http_requests_total", "/a"] == 1
    assert samples(PrometheusStatLogger("tiny"))["trio_llm_engine_statistics", ""] == 1


@pytest.mark.parametrize(("level", "state"), [(0, "awake"), (1, "weights_offloaded"), (2, "discard_all")])
def test_an_engine_is_in_one_state_of_sleep(level: int, state: str) -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(SchedulerStats(num_blocks=4, num_free_blocks=4, sleep_level=level), IterationStats())

    states = {label: value for (name, label), value in samples(logger).items() if name == "vllm:engine_sleep_state"}

    assert states == {one: float(one == state) for one in ("awake", "weights_offloaded", "discard_all")}


def test_waiting_requests_add_up_over_their_reasons() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(SchedulerStats(num_waiting=5, num_deferred=2), IterationStats())

    values = samples(logger)

    assert values["vllm:num_requests_waiting", ""] == 5
    assert values["vllm:num_requests_waiting_by_reason", "capacity"] == 3
    assert values["vllm:num_requests_waiting_by_reason", "deferred"] == 2


def test_prompt_tokens_add_up_over_their_sources() -> None:
    logger = PrometheusStatLogger("tiny")
    logger.record(None, IterationStats(num_prompt_tokens=10, num_queried_tokens=9, num_cached_tokens=4))

    values = samples(logger)

    assert values["vllm:prompt_tokens_by_source_total", "local_compute"] == 6
    assert values["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 4
    assert values["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == 0
    assert values["vllm:prompt_tokens_cached_by_source_total", "device"] == 4


def test_times_of_a_request_that_are_not_known_are_in_no_histogram() -> None:
    logger = PrometheusStatLogger("tiny")
    known = FinishedRequestStats(
        request_id="r",
        finish_reason="stop",
        num_prompt_tokens=7,
        num_cached_tokens=5,
        num_output_tokens=3,
        max_tokens=16,
        e2e_latency_s=4.0,
        time_to_first_token_s=2.0,
        queue_time_s=1.0,
        prefill_time_s=0.5,
        decode_time_s=2.0,
        num_preemptions=2,
        num_choices=4,
        max_num_output_tokens=9,
    )
    logger.record(None, IterationStats(finished=[known, finished("abort")]))

    values = samples(logger)

    for name, value in {
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 1.0,
        "request_prefill_kv_computed_tokens": 2.0,
        "request_num_preemptions": 2.0,
        "request_params_n": 4.0,
        "request_max_num_generation_tokens": 9.0,
    }.items():
        assert values[f"vllm:{name}_count", ""] == 1, name
        assert values[f"vllm:{name}_sum", ""] == value, name
    assert values["vllm:request_params_max_tokens_count", ""] == 2


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_names_of_samples_begin_with_those_of_their_families(accept: str) -> None:
    lines = PrometheusStatLogger("tiny").render(accept)[0].decode().splitlines()
    family = ""
    for line in lines:
        if line.startswith("# TYPE "):
            family = line.split()[2]
        elif not line.startswith("#"):
            assert line.startswith(family), line


def test_engines_show_by_their_ranks_before_they_are_heard_of() -> None:
    text = PrometheusStatLogger("m", engine_indices=(2, 3)).render()[0].decode()

    assert set(re.findall(r'engine="(\d+)"', text)) == {"2", "3"}
