"""SamplingParams: how the answer to one request is chosen, and when it ends.

Pure. Made by callers and routes, checked on construction, sent to the engine as it is.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from trio_llm.errors import InvalidRequestError

__all__ = ["MAX_LOGPROBS", "MAX_STOP_STRINGS", "MAX_STOP_TOKEN_IDS", "RequestOutputKind", "SamplingParams"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 0.01
"""Positive temperatures below this count as this: dividing logits by less overflows half precision."""

_INT64 = 2**63


class RequestOutputKind(enum.IntEnum):
    """What each item of a stream holds."""

    DELTA = 0
    """Only what is new since the last item."""
    CUMULATIVE = 1
    """Everything so far."""
    FINAL_ONLY = 2
    """One item, at the end, with everything."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """Parameters of one generation. Every field is checked on construction, also on the engine's side.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    temperature: float = 1.0
    """0 is greedy; up to 2."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: no limit."""
    seed: int | None = None
    """int64. Same seed and same parameters give the same tokens; None: a fresh one for each request."""
    max_tokens: int | None = None
    """Tokens to generate at most; None: as many as the context has room for."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens were generated."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens (not after `stop_token_ids`)."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each sampled token and of this many alternatives; None: none at all."""
    output_kind: RequestOutputKind = RequestOutputKind.DELTA

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        _check_number("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < MIN_TEMPERATURE:
            set_field(self, "temperature", MIN_TEMPERATURE)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be in (0, 1], not 0", "top_p")
        _check_integer("top_k", self.top_k, 0, _INT64 - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -_INT64, _INT64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, _INT64 - 1)
        _check_integer("min_tokens", self.min_tokens, 0, _INT64 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", "min_tokens"
            )
        set_field(self, "stop", _check_stop(self.stop))
        set_field(self, "stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError("output_kind must be a RequestOutputKind", "output_kind")

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken at every step; top_p, top_k and seed have no effect."""
        return self.temperature == 0


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    # `not low <= x <= high` refuses NaN too, which `x < low or x > high` would let pass.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low} to {high}, not {_quote(value)}", name)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, not {_quote(value)}", name)


def _check_stop(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple) or len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings", "stop")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, not {_quote(text)}", "stop"
            )
        if not is_valid_text(text):
            raise InvalidRequestError("a stop string contains a lone surrogate, which is not valid text", "stop")
    return tuple(stop)


def _check_token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"{name} must be a list of at most {MAX_STOP_TOKEN_IDS} token ids", name)
    for token_id in ids:
        _check_integer(name, token_id, 0, 2**31 - 1)
    return tuple(ids)


def is_valid_text(text: str) -> bool:
    """False for text that holds a lone surrogate: it has no UTF-8 form and fails late, far from its sender."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quote(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of very many digits"  # Python refuses to write it out
    return ascii(value)[:200]
