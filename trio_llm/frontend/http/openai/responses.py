"""Whole answers in the shapes of OpenAI's API, and what chunks of streams have in common with them.

Pure. Used by the generating routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trio_llm.frontend.http.answers.assembly import (
    Choice,
    PromptEchoed,
    Usage,
)
from trio_llm.frontend.http.openai.answer_bodies import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    MetricsBody,
    UsageBody,
)
from trio_llm.frontend.http.openai.logprobs import (
    CompletionLogprobs,
    NameToken,
    PromptLogprobs,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from trio_llm.frontend.http.openai.text_offsets import MakeOffsets

__all__ = ["AnswerHead", "chat_answer", "completion_answer", "echo_logprobs", "metrics_body", "usage_body"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that an answer begins with, and that are the same in every chunk of it."""

    id: str
    created: int  # seconds since 1970
    model: str


def chat_answer(head: AnswerHead, choices: Sequence[Choice], usage: Usage, name_token: NameToken) -> bytes:
    """The body of a chat completion that is not streamed."""
    echoed_logprobs, echoed_ids, prompt_text = _echoed(choices[0].prompt)
    answer: ChatCompletion = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_chat_choice(choice, name_token) for choice in choices],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage_body(usage),
        "prompt_logprobs": echoed_logprobs,
        "prompt_token_ids": echoed_ids,
        "prompt_text": prompt_text,
        "kv_transfer_params": None,
        "metrics": metrics_body(usage),
    }
    return _encode(answer)


def completion_answer(
    head: AnswerHead,
    choices: Sequence[Choice],
    usage: Usage,
    name_token: NameToken,
    make_offsets: MakeOffsets | None,
) -> bytes:
    """The body of a completion that is not streamed.

    Args:
        make_offsets: as `CompletionChunks`.
    """
    answer: Completion = {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [_completion_choice(choice, name_token, make_offsets) for choice in choices],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage_body(usage),
        "kv_transfer_params": None,
    }
    if usage.metrics is not None:
        answer["metrics"] = metrics_body(usage)
    return _encode(answer)


def _chat_choice(choice: Choice, name_token: NameToken) -> ChatChoice:
    body: ChatChoice = {
        "index": choice.index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            "reasoning_content": None,
        },
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, name_token),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
    }
    if choice.weight_versions is not None:
        body["weight_versions"] = choice.weight_versions
    return body


def _completion_choice(choice: Choice, name_token: NameToken, make_offsets: MakeOffsets | None) -> CompletionChoice:
    echoed_logprobs, echoed_ids, prompt_text = _echoed(choice.prompt)
    logprobs = None
    if choice.logprobs is not None:
        assert make_offsets is not None
        offsets = make_offsets(choice.index).place(choice.logprobs)
        logprobs = completion_logprobs(choice.logprobs, offsets, name_token)
        if choice.prompt and (echoed := echo_logprobs(choice.prompt, name_token)):
            logprobs = _joined(echoed, logprobs)
    body: CompletionChoice = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "prompt_logprobs": echoed_logprobs,
        "prompt_token_ids": echoed_ids,
        "prompt_text": prompt_text,
    }
    if choice.weight_versions is not None:
        body["weight_versions"] = choice.weight_versions
    return body


def _echoed(echoed: PromptEchoed | None) -> tuple[PromptLogprobs | None, list[int] | None, str | None]:
    """The prompt's log-probabilities, ids and text that stand in fields of their own."""
    if echoed is None:
        return None, None, None
    return prompt_logprobs(echoed.prompt_logprobs), echoed.token_ids, echoed.prompt.whole_text


def echo_logprobs(event: PromptEchoed, name_token: NameToken) -> CompletionLogprobs | None:
    """Those of a prompt that come before those of its continuation. None: not asked for, or not known."""
    prompt = event.prompt
    if event.echo_logprobs is None or prompt.text_offsets is None:
        return None
    return completion_logprobs(event.echo_logprobs, prompt.text_offsets, name_token, first_token=prompt.first_token)


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "text_offset": first["text_offset"] + second["text_offset"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "tokens": first["tokens"] + second["tokens"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
    }


def usage_body(usage: Usage) -> UsageBody:
    """The field `usage` of an answer or a chunk."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "completion_tokens": usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": None,
    }


def metrics_body(usage: Usage) -> MetricsBody | None:
    """How long the answer took. None: that is not to be told."""
    metrics = usage.metrics
    if metrics is None:
        return None
    generation_s, num_tokens = metrics.generation_time_s, usage.num_output_tokens
    mean_s = generation_s / (num_tokens - 1) if generation_s is not None and num_tokens > 1 else None
    return {
        "time_to_first_token_ms": _as_ms(metrics.time_to_first_token_s),
        "generation_time_ms": _as_ms(generation_s),
        "queue_time_ms": _as_ms(metrics.queue_time_s),
        "mean_itl_ms": _as_ms(mean_s),
        "tokens_per_second": round(num_tokens / generation_s, 3) if generation_s else None,
    }


def _as_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
