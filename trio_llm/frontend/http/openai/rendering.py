"""Rendering of answers: events as chunks, and whole answers, in the shapes of OpenAI's API.

Pure. Used by the routes of chat completions and completions. Chunks are made from a prepared beginning, because
one is made for nearly every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from trio_llm.frontend.http.sse import DONE_EVENT
from trio_llm.frontend.text.assembly import Choice, ChoiceFinished, ChoiceStarted, Event, TextDelta, Usage
from trio_llm.outputs import Logprob, TokenLogprobs

__all__ = ["AnswerHead", "ChatChunks", "CompletionChunks", "chat_answer", "completion_answer"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer, or the whole one, begins with."""

    id: str
    created: int  # seconds since 1970
    model: str


class _Chunks:
    """Chunks of one stream. Subclasses render a choice."""

    object_name: str

    def __init__(self, head: AnswerHead, *, with_usage: bool, with_continuous_usage: bool) -> None:
        fields = {"id": head.id, "object": self.object_name, "created": head.created, "model": head.model}
        self._beginning = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._with_usage = with_usage
        self._with_continuous_usage = with_continuous_usage

    def render(self, events: list[Event], usage: Usage) -> bytes:
        """One chunk an event."""
        end = b"]}\n\n"
        if self._with_continuous_usage:
            end = b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"
        return b"".join(self._beginning + choice + end for choice in map(self._choice, events) if choice)

    def ending(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for, and the end mark."""
        if not self._with_usage:
            return DONE_EVENT
        return (
            self._beginning + b'],"usage":' + _encode(_usage(usage)) + b',"system_fingerprint":null}\n\n' + DONE_EVENT
        )

    def _choice(self, event: Event) -> bytes:
        raise NotImplementedError


class ChatChunks(_Chunks):
    """Chunks of a chat completion."""

    object_name = "chat.completion.chunk"

    def _choice(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            logprobs = b"null" if event.logprobs is None else _encode(_chat_logprobs(event.logprobs))
            return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (
                event.index,
                _encode(event.text),
                logprobs,
            )
        if isinstance(event, ChoiceStarted):
            return (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                % event.index
            )
        return _encode(
            {
                "index": event.index,
                "delta": {"content": event.text},
                "logprobs": None if event.logprobs is None else _chat_logprobs(event.logprobs),
                "finish_reason": event.finish_reason,
                "stop_reason": event.stop_reason,
            }
        )


class CompletionChunks(_Chunks):
    """Chunks of a completion."""

    object_name = "text_completion"

    def __init__(self, head: AnswerHead, *, with_usage: bool, with_continuous_usage: bool) -> None:
        super().__init__(head, with_usage=with_usage, with_continuous_usage=with_continuous_usage)
        self._offsets: dict[int, int] = {}  # index -> characters of the tokens listed so far

    def _choice(self, event: Event) -> bytes:
        if isinstance(event, ChoiceStarted):
            return b""  # completions have no such chunk
        return _encode(
            {
                "index": event.index,
                "text": event.text,
                "logprobs": self._logprobs(event),
                "finish_reason": event.finish_reason if isinstance(event, ChoiceFinished) else None,
                "stop_reason": event.stop_reason if isinstance(event, ChoiceFinished) else None,
            }
        )

    def _logprobs(self, event: TextDelta | ChoiceFinished) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        offset = self._offsets.get(event.index, 0)
        rendered, self._offsets[event.index] = _completion_logprobs(event.logprobs, offset)
        return rendered


# ------------------------------------------------------------------------------------ whole answers


def chat_answer(head: AnswerHead, choices: list[Choice], usage: Usage) -> bytes:
    """The body of a chat completion that is not streamed."""
    return _encode(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_chat_choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(usage),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "metrics": None,
        }
    )


def completion_answer(head: AnswerHead, choices: list[Choice], usage: Usage) -> bytes:
    """The body of a completion that is not streamed."""
    return _encode(
        {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [_completion_choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(usage),
            "kv_transfer_params": None,
        }
    )


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
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
        "logprobs": None if choice.logprobs is None else _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": None,
    }


def _completion_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _completion_logprobs(choice.logprobs, 0)[0],
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "completion_tokens": usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": None,
    }


# ---------------------------------------------------------------------------------- log-probabilities


def _chat_logprobs(positions: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {**_candidate(position.sampled), "top_logprobs": [_candidate(one) for one in position.top]}
            for position in positions
        ]
    }


def _candidate(logprob: Logprob) -> dict[str, Any]:
    return {"token": logprob.token, "logprob": logprob.logprob, "bytes": list(logprob.token_bytes)}


def _completion_logprobs(positions: list[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The positions in columns, and the offset after them."""
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.sampled.token)
    columns = {
        "text_offset": offsets,
        "token_logprobs": [position.sampled.logprob for position in positions],
        "tokens": [position.sampled.token for position in positions],
        "top_logprobs": [_top(position) for position in positions],
    }
    return columns, offset


def _top(position: TokenLogprobs) -> dict[str, float]:
    """The alternatives, best first, and the sampled token, which may or may not be one of them."""
    top: dict[str, float] = {}
    for one in (*position.top, position.sampled):
        top.setdefault(one.token, one.logprob)
    return top
