"""What a request's span says about it, as attributes of OpenTelemetry.

Pure. Used by the tracer. Names: vLLM's, and those of OpenTelemetry's semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), which are others for the same numbers in part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams

__all__ = ["AttributeValue", "request_attributes"]

AttributeValue = str | bool | int | float | list[str]


def request_attributes(report: RequestReport, model_name: str) -> Mapping[str, AttributeValue]:
    """The attributes of a request that is over. Neither its prompt nor its answer is among them."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(report.params),
        "gen_ai.provider.name": "trio_llm",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": report.external_id,
        "gen_ai.response.finish_reasons": report.finish_reasons,
        "gen_ai.usage.prompt_tokens": report.num_prompt_tokens,
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.num_cached_tokens,
        "gen_ai.usage.completion_tokens": report.num_output_tokens,
        "gen_ai.usage.output_tokens": report.num_output_tokens,
        "gen_ai.usage.num_sequences": len(report.ends),
        "gen_ai.latency.e2e": report.e2e_latency_s,
    }
    attributes |= {name: seconds for name, seconds in _latencies(report) if seconds is not None}
    if isinstance(report.params, SamplingParams):
        attributes |= _sampling_attributes(report.params)
    if report.has_failed:
        attributes["error.type"] = "_OTHER" if report.error is None else type(report.error).__name__
    return attributes


def _latencies(report: RequestReport) -> Iterator[tuple[str, float | None]]:
    prefill_s, decode_s = report.prefill_time_s, report.decode_time_s
    yield "gen_ai.latency.time_to_first_token", report.time_to_first_token_s
    yield "gen_ai.latency.time_in_queue", report.queue_time_s
    yield "gen_ai.latency.time_in_model_prefill", prefill_s
    yield "gen_ai.latency.time_in_model_decode", decode_s
    if prefill_s is not None and (decode_s is not None or isinstance(report.params, PoolingParams)):
        yield "gen_ai.latency.time_in_model_inference", prefill_s + (decode_s or 0.0)


def _sampling_attributes(params: SamplingParams) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def _operation(params: SamplingParams | PoolingParams) -> str:
    """The convention has names for these two operations; for others the task is one."""
    if isinstance(params, SamplingParams):
        return "text_completion"
    return "embeddings" if params.task == "embed" else params.task
