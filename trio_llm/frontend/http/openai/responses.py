"""Answers in the shapes of OpenAI's API: events as chunks of a stream, and whole answers.

Pure. Used by the generating routes. Chunks are made from a prepared beginning, because nearly every token makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from trio_llm.frontend.http.openai.answer_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionLogprobs,
    PromptLogprobs,
    UsageBody,
)
from trio_llm.frontend.http.openai.logprobs import (
    NameToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_text,
)
from trio_llm.frontend.http.openai.text_offsets import MakeOffsets, TextOffsets
from trio_llm.frontend.http.server.sse import DONE_EVENT
from trio_llm.outputs import TokenLogprobs

__all__ = ["AnswerHead", "ChatChunks", "CompletionChunks", "StreamUsage", "chat_answer", "completion_answer"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that are the same in every chunk of an answer."""

    id: str
    created: int  # seconds since 1970
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUsage:
    """The chunks of a stream that carry usage."""

    at_the_end: bool = False
    in_every_chunk: bool = False


class _Chunks:
    """Chunks of one stream. Subclasses write a choice."""

    object_name: str

    def __init__(
        self,
        head: AnswerHead,
        usage: StreamUsage,
        name_token: NameToken,
        *,
        prompt_token_ids: list[int] | None = None,
    ) -> None:
        fields = {"id": head.id, "object": self.object_name, "created": head.created, "model": head.model}
        self._beginning = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._first_only = b""
        if prompt_token_ids is not None:
            self._first_only = b',"prompt_token_ids":' + _encode(prompt_token_ids)
        self._usage = usage
        self._name_token = name_token

    def render(self, events: list[Event], usage: Usage) -> bytes:
        """One chunk per event. Usage in a chunk counts the tokens up to that chunk."""
        if not self._usage.in_every_chunk and not self._first_only:
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
                    chunks += [b',"usage":', _encode(_usage(sent))]
                chunks.append(b"}\n\n")
        return b"".join(chunks)

    def ending(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was asked for, and the end mark."""
        if not self._usage.at_the_end:
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
            return b""  # its ids, which are all that can be asked for, stand in the first chunk
        choice: ChatChunkChoice = {
            "index": event.index,
            "delta": {"content": event.text},
            "logprobs": None if event.logprobs is None else chat_logprobs(event.logprobs, self._name_token),
            "finish_reason": event.finish_reason,
            "stop_reason": event.stop_reason,
        }
        if event.token_ids is not None:
            choice["token_ids"] = event.token_ids
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
        return _encode(choice)

    def _prompt(self, event: PromptEchoed) -> bytes:
        if not event.prompt.text and event.token_ids is None:
            return b""
        choice: CompletionChunkChoice = {
            "index": event.index,
            "text": event.prompt.text,
            "logprobs": _echo_logprobs(event, self._name_token),
            "finish_reason": None,
            "stop_reason": None,
        }
        if event.token_ids is not None:
            choice["token_ids"] = []
            choice["prompt_token_ids"] = event.token_ids
        return _encode(choice)

    def _logprobs(self, index: int, positions: list[TokenLogprobs]) -> CompletionLogprobs:
        offsets = self._offsets.get(index)
        if offsets is None:
            assert self._make_offsets is not None
            offsets = self._offsets[index] = self._make_offsets(index)
        return completion_logprobs(positions, offsets.place(positions), self._name_token)


# ------------------------------------------------------------------------------------ whole answers


def chat_answer(head: AnswerHead, choices: Sequence[Choice], usage: Usage, name_token: NameToken) -> bytes:
    """The body of a chat completion that is not streamed."""
    echoed_logprobs, echoed_ids = _echoed(choices[0].prompt)
    answer: ChatCompletion = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_chat_choice(choice, name_token) for choice in choices],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(usage),
        "prompt_logprobs": echoed_logprobs,
        "prompt_token_ids": echoed_ids,
        "prompt_text": None,
        "kv_transfer_params": None,
        "metrics": None,
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
        "usage": _usage(usage),
        "kv_transfer_params": None,
    }
    return _encode(answer)


def _chat_choice(choice: Choice, name_token: NameToken) -> ChatChoice:
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
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, name_token),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
    }


def _completion_choice(choice: Choice, name_token: NameToken, make_offsets: MakeOffsets | None) -> CompletionChoice:
    echoed_logprobs, echoed_ids = _echoed(choice.prompt)
    logprobs = None
    if choice.logprobs is not None:
        assert make_offsets is not None
        offsets = make_offsets(choice.index).place(choice.logprobs)
        logprobs = completion_logprobs(choice.logprobs, offsets, name_token)
        if choice.prompt and (echoed := _echo_logprobs(choice.prompt, name_token)):
            logprobs = _joined(echoed, logprobs)
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "prompt_logprobs": echoed_logprobs,
        "prompt_token_ids": echoed_ids,
    }


def _echoed(prompt: PromptEchoed | None) -> tuple[PromptLogprobs | None, list[int] | None]:
    """The prompt's log-probabilities and ids that stand in fields of their own."""
    return (None, None) if prompt is None else (prompt_logprobs(prompt.prompt_logprobs), prompt.token_ids)


def _echo_logprobs(event: PromptEchoed, name_token: NameToken) -> CompletionLogprobs | None:
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


def _usage(usage: Usage) -> UsageBody:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "completion_tokens": usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": None,
    }
