"""Rendering of answers: events as chunks, and whole answers, in the shapes of OpenAI's API.

Pure. Used by the routes of chat completions and completions. Chunks are made from a prepared beginning, because
one is made for nearly every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trio_llm.frontend.http.answers.assembly import (
    Choice,
    ChoiceFinished,
    ChoiceStarted,
    Event,
    PromptEchoed,
    TextDelta,
    Usage,
)
from trio_llm.frontend.http.server.sse import DONE_EVENT
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

    def __init__(
        self,
        head: AnswerHead,
        *,
        with_usage: bool,
        with_continuous_usage: bool,
        prompt_token_ids: list[int] | None = None,
    ) -> None:
        fields = {"id": head.id, "object": self.object_name, "created": head.created, "model": head.model}
        self._beginning = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._first_only = b""
        if prompt_token_ids is not None:
            self._first_only = b',"prompt_token_ids":' + _encode(prompt_token_ids)
        self._with_usage = with_usage
        self._with_continuous_usage = with_continuous_usage

    def render(self, events: list[Event], usage: Usage) -> bytes:
        """One chunk an event."""
        end = b"]}\n\n"
        if self._with_continuous_usage:
            end = b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"
        if self._first_only:
            end = b"]" + self._first_only + end[1:]
            self._first_only = b""
            first, *events = events  # the start of a choice: never empty
            return self._beginning + self._choice(first) + end + self.render(events, usage)
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
            return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
                event.index,
                _encode(event.text),
                logprobs,
                b"" if event.token_ids is None else b',"token_ids":' + _encode(event.token_ids),
            )
        if isinstance(event, ChoiceStarted):
            return (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                % event.index
            )
        if isinstance(event, PromptEchoed):
            return b""  # its ids, which are all that can be asked for, stand in the first chunk
        return _encode(
            {
                "index": event.index,
                "delta": {"content": event.text},
                "logprobs": None if event.logprobs is None else _chat_logprobs(event.logprobs),
                "finish_reason": event.finish_reason,
                "stop_reason": event.stop_reason,
                **_token_ids(event),
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
        if isinstance(event, PromptEchoed):
            return self._prompt(event)
        return _encode(
            {
                "index": event.index,
                "text": event.text,
                "logprobs": self._logprobs(event),
                "finish_reason": event.finish_reason if isinstance(event, ChoiceFinished) else None,
                "stop_reason": event.stop_reason if isinstance(event, ChoiceFinished) else None,
                **_token_ids(event),
            }
        )

    def _prompt(self, event: PromptEchoed) -> bytes:
        if not event.text and event.token_ids is None:
            return b""
        logprobs = None
        if event.logprobs is not None:
            logprobs, self._offsets[event.index] = _completion_logprobs(event.logprobs, 0, event.first_token)
        else:
            self._offsets[event.index] = len(event.text)
        choice = {
            "index": event.index,
            "text": event.text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }
        if event.token_ids is not None:
            choice |= {"token_ids": [], "prompt_token_ids": event.token_ids}
        return _encode(choice)

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
            "prompt_logprobs": _prompt_logprobs(choices[0]),
            "prompt_token_ids": choices[0].prompt and choices[0].prompt.token_ids,
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
        "token_ids": choice.token_ids,
    }


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        prompt = choice.prompt
        echoed = (prompt and prompt.logprobs) or []
        offset = len(prompt.text) if prompt and not echoed else 0
        logprobs, _ = _completion_logprobs([*echoed, *choice.logprobs], offset, prompt.first_token if prompt else "")
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "prompt_logprobs": _prompt_logprobs(choice),
        "prompt_token_ids": choice.prompt and choice.prompt.token_ids,
    }


def _token_ids(event: TextDelta | ChoiceFinished) -> dict[str, list[int]]:
    return {} if event.token_ids is None else {"token_ids": event.token_ids}


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


def _completion_logprobs(
    positions: Sequence[TokenLogprobs | None], offset: int, first_token: str = ""
) -> tuple[dict[str, Any], int]:
    """The positions in columns, and the offset after them.

    Args:
        first_token: text of the position that is None, which only the first of a prompt is.
    """
    tokens = [first_token if position is None else position.sampled.token for position in positions]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    columns = {
        "text_offset": offsets,
        "token_logprobs": [None if position is None else position.sampled.logprob for position in positions],
        "tokens": tokens,
        "top_logprobs": [None if position is None else _top(position) for position in positions],
    }
    return columns, offset


def _prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt its own candidate, then the likeliest, by token id."""
    if choice.prompt is None or choice.prompt.scores is None:
        return None
    return [None if position is None else _by_token_id(position) for position in choice.prompt.scores]


def _by_token_id(position: TokenLogprobs) -> dict[str, Any]:
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.token}
        for one in (position.sampled, *position.top)
    }


def _top(position: TokenLogprobs) -> dict[str, float]:
    """The alternatives, best first, and the sampled token, which may or may not be one of them."""
    top: dict[str, float] = {}
    for one in (*position.top, position.sampled):
        top.setdefault(one.token, one.logprob)
    return top
