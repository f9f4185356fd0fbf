"""What a stream yields: RequestOutput, CompletionOutput and their log-probabilities. PoolingOutput: a vector.

Pure. Made by the output processor, read by routes and library callers. `gc=False`: they hold plain data and no cycles,
and at thousands a second the garbage collector would take a tenth of the front end's time to find that out.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "PoolingOutput", "RequestOutput", "TokenLogprobs"]

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


class CompletionOutput(msgspec.Struct, gc=False):
    """One choice. With DELTA: what is new in it; else: all of it. Its last one has the finish reason.

    In a session that holds for each answer, and CUMULATIVE gives all of the newest.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token of `token_ids`; None unless asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end."""


class RequestOutput(msgspec.Struct, gc=False):
    """One item of a stream."""

    request_id: str
    """The caller's id, or the one that was made for the caller."""
    num_prompt_tokens: int
    """For a session: tokens of all its inputs so far."""
    num_cached_tokens: int
    """Prompt tokens that the engine did not have to compute, since they were in its prefix cache when the request came;
    with several choices, once for all of them."""
    outputs: list[CompletionOutput]
    """The choices that there is something new of, by index; FINAL_ONLY: all."""
    finished: bool
    """Nothing comes after this item."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a token of the prompt, None for the first: nothing comes before it. With DELTA in the first item of
    a choice alone, else in every item since they are known; None unless asked for."""
    weight_version: str = "default"
    """The version of the weights that computed the newest token, as the last `update_weights` named it."""


class PoolingOutput(msgspec.Struct, frozen=True, gc=False):
    """One vector for one prompt."""

    request_id: str
    """The caller's id, or the one that was made for the caller."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the engine did not have to compute."""
    data: bytes
    """float32, little-endian, one number after the other."""
    weight_version: str = "default"
    """The version of the weights that computed it."""

    @property
    def values(self) -> list[float]:
        """The same as numbers: the embedding, or one for each class. Made anew each time."""
        return list(struct.unpack(f"<{len(self.data) // 4}f", self.data))
