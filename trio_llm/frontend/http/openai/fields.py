"""Fields that chat completions and completions share, and their conversion to SamplingParams.

Pure. What is known but not supported yet is a clear error unless its value changes nothing; what is unknown is
accepted and ignored, as clients expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.body import ModelRequest, Neutral, RequestBody, WholeNumber, only
from trio_llm.frontend.http.openai.schemas import (
    INT64_MAX,
    INT64_MIN,
    TOKEN_ID,
    Schema,
    bounded,
    implies,
)
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS
from trio_llm.quoting import quote
from trio_llm.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestOutputKind,
    SamplingParams,
)

__all__ = ["NOT_SUPPORTED", "CommonFields", "StreamOptions", "sampling_params"]

NOT_SUPPORTED: Final[Mapping[str, Neutral]] = {
    "best_of": only(1),
    "length_penalty": only(1),
    "logprob_token_ids": only([]),
    "prompt_embeds": only([]),
    "use_beam_search": only(False),
    "response_format": only({"type": "text"}),
    "structured_outputs": only({}),
    "guided_json": only(),
    "guided_regex": only(),
    "guided_choice": only(),
    "guided_grammar": only(),
    "stream_interval": only(1),
    "repetition_detection": only(),
    "thinking_token_budget": only(-1),
    "logits_processors": only([]),
    "kv_transfer_params": only({}),
    "mm_processor_kwargs": only({}),
}
"""Fields of both protocols, each with the values that are accepted because they change nothing."""

_STOP_STRING: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_STOP: Final[Schema] = {
    "anyOf": [
        _STOP_STRING,
        {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
        {"type": "null"},
    ]
}
TokenId = Annotated[WholeNumber, WithJsonSchema(TOKEN_ID)]
BadWord = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS})]
_LOGIT_BIAS: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
            "maxProperties": MAX_LOGIT_BIAS_TOKENS,
        },
        {"type": "null"},
    ]
}


class StreamOptions(RequestBody):
    """Things that a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(ModelRequest):
    """Fields of every generating request. Ranges are checked by SamplingParams."""

    rules: ClassVar[tuple[Schema, ...]] = (
        implies("stream_options", {"type": "object"}, "stream", {"const": True}),
        implies("prompt_logprobs", {"type": "integer"}, "stream", {"enum": [False, None]}, is_needed=False),
    )

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, bounded(0, 2)] = None
    top_p: Annotated[float | None, bounded(above=0, most=1)] = None
    top_k: Annotated[WholeNumber | None, bounded(-1, INT64_MAX)] = None
    seed: Annotated[WholeNumber | None, bounded(INT64_MIN, INT64_MAX)] = None
    n: Annotated[WholeNumber | None, bounded(1, MAX_N)] = None
    max_tokens: Annotated[WholeNumber | None, bounded(1, INT64_MAX)] = None
    min_tokens: Annotated[WholeNumber | None, bounded(0, INT64_MAX)] = None
    stop: Annotated[Any, WithJsonSchema(_STOP)] = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId] | None, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] = None
    bad_words: Annotated[list[BadWord] | None, Field(max_length=MAX_BAD_WORDS)] = None
    prompt_logprobs: Annotated[WholeNumber | None, bounded(0, MAX_LOGPROBS)] = None
    min_p: Annotated[float | None, bounded(0, 1)] = None
    presence_penalty: Annotated[float | None, bounded(-MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, bounded(-MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, bounded(above=0)] = None
    # JSON has no other keys than strings.
    logit_bias: Annotated[
        dict[str, float] | None, Field(max_length=MAX_LOGIT_BIAS_TOKENS), WithJsonSchema(_LOGIT_BIAS)
    ] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_weight_versions: bool | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] = None

    def check_together(self) -> None:
        super().check_together()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")

    @property
    def wants_usage(self) -> bool:
        """A usage chunk ends the stream."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Every chunk carries what was counted so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


# --------------------------------------------------------------------------------------- conversion


def sampling_params(
    fields: CommonFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, float],
) -> SamplingParams:
    """The parameters that a request asks for. Fields that are missing or null take their default.

    Args:
        defaults: of the served model; they go before those of `SamplingParams`.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """
    if isinstance(fields.stop, list) and len(fields.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(fields.stop)} strings and the limit is {MAX_STOP_STRINGS}", "stop")
    given = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "seed": fields.seed,
        "n": fields.n,
        "max_tokens": max_tokens,
        "min_tokens": fields.min_tokens,
        "stop": fields.stop,
        "stop_token_ids": fields.stop_token_ids,
        "ignore_eos": fields.ignore_eos,
        "include_stop_str_in_output": fields.include_stop_str_in_output,
        "skip_special_tokens": fields.skip_special_tokens,
        "spaces_between_special_tokens": fields.spaces_between_special_tokens,
        "allowed_token_ids": fields.allowed_token_ids,
        "bad_words": fields.bad_words,
        "prompt_logprobs": prompt_logprobs,
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": None if fields.logit_bias is None else _logit_bias(fields.logit_bias),
        "logprobs": logprobs,
    }
    return SamplingParams(
        output_kind=RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY,
        **{**defaults, **{name: value for name, value in given.items() if value is not None}},
    )


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """With the keys that the engine knows.

    Raises:
        InvalidRequestError: a key is not a token id in plain decimal.
    """
    for key in bias:
        # Nothing but what `str` makes of an id, so that no two keys are the same id. The largest has ten digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(f"logit_bias: {quote(key)} is not a token id", "logit_bias")
    return {int(key): value for key, value in bias.items()}
