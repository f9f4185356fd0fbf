"""SamplingParams: how the answer to one request is chosen, and when it ends.

Pure. Made by callers and routes, checked on construction, sent to the engine as it is.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import quote

__all__ = [
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_CHARS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGIT_BIAS_TOKENS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_PENALTY",
    "MAX_REPETITION_PENALTY",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MIN_REPETITION_PENALTY",
    "RequestOutputKind",
    "SamplingParams",
]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROBS = 20
MAX_N = 128
MAX_PENALTY = 2
"""The largest presence or frequency penalty, positive or negative."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10_000
"""Values outside these two count as the nearer one: further out, scores would overflow."""
MAX_LOGIT_BIAS = 100
"""The largest bias, positive or negative."""
MAX_LOGIT_BIAS_TOKENS = 1024
MIN_TEMPERATURE = 0.01
"""Positive temperatures below this count as this: dividing logits by less overflows half precision."""

_INT64 = 2**63


class RequestOutputKind(enum.IntEnum):
    """What each item of a stream contains."""

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
    """Sample from this many of the likeliest tokens; 0 or -1: no limit, kept as 0."""
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
    """Log-probabilities of each sampled token and of this many alternatives; None: no log-probabilities."""
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    n: int = 1
    """Choices for the prompt. Choice i has the seed plus i, wrapped to int64, and equals the answer to a request of its
    own with that seed. With temperature 0 all choices are equal and computed once. The engine gets n = 1 only."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are sampled, 1 to 1024 of them; None: all. Ends of the answer that are not among them never
    come, other than by `max_tokens`. A request is refused if other parameters leave none of them."""
    bad_words: tuple[str, ...] = ()
    """Words that do not come in the answer, at most 128: neither their tokens nor those of the word after a space. The
    same text in other tokens may come. The answer cannot complete a word that the prompt has begun either."""
    spaces_between_special_tokens: bool = True
    """False: no space between special tokens that follow each other, where the tokenizer's decoder writes one and
    `skip_special_tokens` is False. Byte-level and byte-fallback tokenizers write none: no effect there."""
    prompt_logprobs: int | None = None
    """Log-probabilities of each token of the prompt and of this many alternatives; None: no log-probabilities."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the probability of the likeliest one, after temperature and before
    `top_k` and `top_p`; in [0, 1], 0: no limit."""
    presence_penalty: float = 0.0
    """Subtracted from the scores of tokens that were generated already; -2 to 2. The prompt does not count. Neither do
    earlier answers of a session."""
    frequency_penalty: float = 0.0
    """Subtracted from the scores of tokens once for each time they were generated; -2 to 2. Counts the same tokens."""
    repetition_penalty: float = 1.0
    """Scores of tokens that stand in prompt or answer are divided by this if they are positive and else multiplied;
    any finite number above 0, 1: no penalty. Applied before the other two."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the scores of these tokens: -100 to 100 for each of up to 1024 token ids. Do not change it later."""

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        _check_number("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < MIN_TEMPERATURE:
            set_field(self, "temperature", MIN_TEMPERATURE)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be in (0, 1], not 0", "top_p")
        _check_integer("top_k", self.top_k, -1, _INT64 - 1)
        set_field(self, "top_k", max(self.top_k, 0))
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
        set_field(self, "stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        if self.allowed_token_ids is not None:
            set_field(self, "allowed_token_ids", _check_allowed(self.allowed_token_ids))
        set_field(self, "bad_words", _check_bad_words(self.bad_words))
        _check_number("min_p", self.min_p, 0, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        set_field(self, "repetition_penalty", _check_repetition(self.repetition_penalty))
        set_field(self, "logit_bias", _check_logit_bias(self.logit_bias))
        self._check_simple_fields()

    def _check_simple_fields(self) -> None:
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_integer(name, count, 0, MAX_LOGPROBS)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError("output_kind must be a RequestOutputKind", "output_kind")
        _check_integer("n", self.n, 1, MAX_N)

    def __hash__(self) -> int:
        # `logit_bias` is a dict, which has no hash of its own.
        fields = (getattr(self, name) for name in self.__struct_fields__ if name != "logit_bias")
        return hash((*fields, frozenset(self.logit_bias.items())))

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken at every step; top_p, top_k and seed have no effect."""
        return self.temperature == 0


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    # `not low <= x <= high` refuses NaN too, which `x < low or x > high` would let pass.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low} to {high}, not {quote(value)}", name)


def _check_integer(name: str, value: Any, low: int, high: int, *, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{name} must be an integer from {low} to {high}, not {quote(value)}"
        raise InvalidRequestError(message, param or name)


def _check_stop(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple) or len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings", "stop")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"each of stop must be a string of 1 to {MAX_STOP_STRING_CHARS} characters, not {quote(text)}", "stop"
            )
        if not is_valid_text(text):
            raise InvalidRequestError("a stop string contains a lone surrogate, which is not valid text", "stop")
    return tuple(stop)


def _check_bad_words(words: Any) -> tuple[str, ...]:
    if not isinstance(words, list | tuple) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"each of bad_words must be a string of 1 to {MAX_BAD_WORD_CHARS} characters, not {quote(word)}",
                "bad_words",
            )
        if not is_valid_text(word):
            raise InvalidRequestError("one of bad_words has a lone surrogate, which is not valid text", "bad_words")
    return tuple(words)


def _check_allowed(ids: Any) -> tuple[int, ...]:
    checked = _check_token_ids("allowed_token_ids", ids, MAX_ALLOWED_TOKEN_IDS)
    if not checked:
        raise InvalidRequestError(
            "allowed_token_ids must not be empty; leave it out to allow all tokens", "allowed_token_ids"
        )
    return checked


def _check_repetition(penalty: Any) -> float:
    # Compared with the largest float, since an integer beyond it cannot be converted. NaN fails the comparison.
    is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
    if not is_number or not 0 < penalty <= sys.float_info.max:
        name = "repetition_penalty"
        raise InvalidRequestError(f"{name} must be a finite number above 0, not {quote(penalty)}", name)
    return min(max(float(penalty), MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY)


def _check_logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS_TOKENS:
        raise InvalidRequestError(
            f"logit_bias must map at most {MAX_LOGIT_BIAS_TOKENS} token ids to numbers", "logit_bias"
        )
    for token_id, value in bias.items():
        _check_integer("logit_bias: a token id", token_id, 0, 2**31 - 1, param="logit_bias")
        _check_number("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return dict(bias)


def _check_token_ids(name: str, ids: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > limit:
        raise InvalidRequestError(f"{name} must be a list of at most {limit} token ids", name)
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
