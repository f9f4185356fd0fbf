"""Outputs: what a stream yields (RequestOutput, CompletionOutput, log-probabilities), and a vector (PoolingOutput).

Pure. Made by the output processor, read by routes and library callers. `gc=False`: they hold plain data without
cycles, and traversing thousands per second would take the garbage collector a tenth of the front end's time.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "PoolingOutput",
    "RequestMetrics",
    "RequestOutput",
    "TokenLogprobs",
    "WeightVersionSpan",
]

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate for one position."""

    token_id: int
    logprob: float
    """Natural logarithm, of the model's own distribution (before temperature and filters)."""
    rank: int
    """1 is the likeliest token of the vocabulary."""
    token: str
    """The token as text; bytes that are not valid UTF-8 on their own show as U+FFFD."""
    token_bytes: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The sampled token of one position, or the prompt's own, and the likeliest alternatives, best first."""

    sampled: Logprob
    top: tuple[Logprob, ...]


class WeightVersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens of an answer that follow each other and were computed by the same weights."""

    version: str
    start: int
    end: int
    """The index of the first of these tokens, and the one after the last, among those of the answer."""


class CompletionOutput(msgspec.Struct, gc=False):
    """One choice: with DELTA its new part, else all of it. The last output of a choice has the finish reason.

    In a session that is so for each answer, and CUMULATIVE gives all of the newest one.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token of `token_ids`; None unless requested."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice; None for the model's own end."""
    weight_versions: list[WeightVersionSpan] | None = None
    """Which weights computed which tokens, in order and without gaps, over all tokens of the choice. In its last output
    alone."""


class RequestMetrics(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """When things happened to a request. With several choices, the first token is that of whichever had one first."""

    arrival_time: float
    """Seconds since 1970."""
    queue_time_s: float | None
    """From its registration until the engine planned its first token. None: it ended before a token came, as in the
    next two."""
    time_to_first_token_s: float | None
    """From its arrival."""
    generation_time_s: float | None
    """From its first token to its last output."""
    total_time_s: float
    """From its arrival to its last output."""


class RequestOutput(msgspec.Struct, gc=False):
    """One item of a stream."""

    request_id: str
    """The caller's id, or the one that was made for the caller."""
    num_prompt_tokens: int
    """For a session: tokens of all its inputs so far."""
    num_cached_tokens: int
    """Prompt tokens that were in the engine's prefix cache when the request came. Several choices count them once."""
    outputs: list[CompletionOutput]
    """The choices with a new part, by index; with FINAL_ONLY all of them."""
    finished: bool
    """This is the last item."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per token of the prompt, None for the first, which no token precedes. With DELTA only in the first item
    of a choice, else in every item once they are known; None unless requested."""
    weight_version: str = "default"
    """The version of the weights that computed the newest token, as the last `update_weights` named it."""
    prompt: str | None = None
    """The prompt's text, before it was cut to `truncate_prompt_tokens`; a conversation's is what its template made of
    it. None if the caller gave token ids, and for sessions."""
    metrics: RequestMetrics | None = None
    """In the last item alone; None if statistics are off (`disable_log_stats`)."""


class PoolingOutput(msgspec.Struct, frozen=True, gc=False):
    """One vector for one prompt."""

    request_id: str
    """The caller's id, or the one that was made for the caller."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were in the engine's prefix cache."""
    data: bytes
    """float32, little-endian, one number after the other."""
    weight_version: str = "default"
    """The version of the weights that computed it."""

    @property
    def values(self) -> list[float]:
        """`data` as numbers: the embedding, or one number per class. Made anew by each call."""
        return list(struct.unpack(f"<{len(self.data) // 4}f", self.data))
