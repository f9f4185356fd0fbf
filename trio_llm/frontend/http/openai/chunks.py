"""Events as chunks of a stream, in the shapes of OpenAI's API.

Pure. Used by the generating routes. Chunks are made from a prepared beginning, because nearly every token makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trio_llm.frontend.http.answers.assembly import ChoiceFinished, ChoiceStarted, Event, PromptEchoed, TextDelta, Usage
from trio_llm.frontend.http.openai.answer_bodies import ChatChunkChoice, CompletionChunkChoice
from trio_llm.frontend.http.openai.logprobs import (
    CompletionLogprobs,
    NameToken,
    chat_logprobs,
    completion_logprobs,
    token_text,
)
from trio_llm.frontend.http.openai.responses import AnswerHead, echo_logprobs, metrics_body, usage_body
from trio_llm.frontend.http.openai.text_offsets import MakeOffsets, TextOffsets
from trio_llm.frontend.http.server.sse import DONE_EVENT
from trio_llm.outputs import TokenLogprobs

__all__ = ["ChatChunks", "CompletionChunks", "StreamUsage"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUsage:
    """The chunks of a stream that carry usage."""

    at_the_end: bool = False
    in_every_chunk: bool = False


class _Chunks:
    """Chunks of one stream. Subclasses write a choice.

    Args:
        prompt_fields: what the first chunk repeats of the prompt.
    """

    object_name: str

    def __init__(
        self,
        head: AnswerHead,
        usage: StreamUsage,
        name_token: NameToken,
        *,
        prompt_fields: Mapping[str, Any] | None = None,
    ) -> None:
        fields = {"id": head.id, "object": self.object_name, "created": head.created, "model": head.model}
        self._beginning = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._first_only = b""
        if prompt_fields:
            self._first_only = b"," + _encode(prompt_fields)[1:-1]
        self._usage = usage
        self._name_token = name_token

    def render(self, events: list[Event], usage: Usage) -> bytes:
        """One chunk per event. Usage in a chunk counts the tokens up to that chunk."""
        if not (self._usage.in_every_chunk or self._first_only or usage.metrics):
            return b"".join([self._beginning + choice + b"]}\n\n" for choice in map(self._choice, events) if choice])
        chunks = []
        num_tokens = usage.num_output_tokens - sum(event.num_tokens for event in events)
        for event in events:
            num_tokens += event.num_tokens
            if choice := self._choice(event):
                chunks += [self._beginning, choice, b"]", self._first_only]
                self._first_only = b""
                if self._usage.in_every_chunk:
                    sent = Usage(usage.num_prompt_tokens, usage.num_cached_tokens, num_tokens)
                    chunks += [b',"usage":', _encode(usage_body(sent))]
                if usage.metrics and isinstance(event, ChoiceFinished) and not self._usage.at_the_end:
                    chunks += [b',"metrics":', _encode(metrics_body(usage))]
                chunks.append(b"}\n\n")
        return b"".join(chunks)

    def ending(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for, and the end mark."""
        if not self._usage.at_the_end:
            return DONE_EVENT
        metrics = b',"metrics":' + _encode(metrics_body(usage)) if usage.metrics else b""
        return (
            self._beginning
            + b'],"usage":'
            + _encode(usage_body(usage))
            + metrics
            + b',"system_fingerprint":null}\n\n'
            + DONE_EVENT
        )

    def _choice(self, event: Event) -> bytes:
        raise NotImplementedError


class ChatChunks(_Chunks):
    """Chunks of a chat completion."""

    object_name = "chat.completion.chunk"

    def _choice(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            logprobs = b"null"
            if event.logprobs is not None:
                logprobs = _encode(chat_logprobs(event.logprobs, self._name_token))
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
            return b""  # its ids and its text, which are all that can be asked for, stand in the first chunk
        choice: ChatChunkChoice = {
            "index": event.index,
            "delta": {"content": event.text},
            "logprobs": None if event.logprobs is None else chat_logprobs(event.logprobs, self._name_token),
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        if event.token_ids is not None:
            choice["token_ids"] = event.token_ids
        if event.weight_versions is not None:
            choice["weight_versions"] = event.weight_versions
        return _encode(choice)


class CompletionChunks(_Chunks):
    """Chunks of a completion.

    Args:
        make_offsets: for the positions of tokens; needed if there are log-probabilities.
    """

    object_name = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        usage: StreamUsage,
        name_token: NameToken = token_text,
        *,
        make_offsets: MakeOffsets | None = None,
    ) -> None:
        super().__init__(head, usage, name_token)
        self._make_offsets = make_offsets
        self._offsets: dict[int, TextOffsets] = {}
        """By choice."""

    def _choice(self, event: Event) -> bytes:
        if isinstance(event, ChoiceStarted):
            return b""  # completions have no such chunk
        if isinstance(event, PromptEchoed):
            return self._prompt(event)
        choice: CompletionChunkChoice = {
            "index": event.index,
            "text": event.text,
            "logprobs": None if event.logprobs is None else self._logprobs(event.index, event.logprobs),
            "finish_reason": event.finish_reason if isinstance(event, ChoiceFinished) else None,
            "stop_reason": event.stop_reason if isinstance(event, ChoiceFinished) else None,
        }
        if event.token_ids is not None:
            choice["token_ids"] = event.token_ids
        if isinstance(event, ChoiceFinished) and event.weight_versions is not None:
            choice["weight_versions"] = event.weight_versions
        return _encode(choice)

    def _prompt(self, event: PromptEchoed) -> bytes:
        if not event.prompt.text and event.token_ids is None and event.prompt.whole_text is None:
            return b""
        choice: CompletionChunkChoice = {
            "index": event.index,
            "text": event.prompt.text,
            "logprobs": echo_logprobs(event, self._name_token),
            "finish_reason": None,
            "stop_reason": None,
        }
        if event.token_ids is not None:
            choice["token_ids"] = []
            choice["prompt_token_ids"] = event.token_ids
        if event.prompt.whole_text is not None:
            choice["prompt_text"] = event.prompt.whole_text
        return _encode(choice)

    def _logprobs(self, index: int, positions: list[TokenLogprobs]) -> CompletionLogprobs:
        offsets = self._offsets.get(index)
        if offsets is None:
            assert self._make_offsets is not None
            offsets = self._offsets[index] = self._make_offsets(index)
        return completion_logprobs(positions, offsets.place(positions), self._name_token)
