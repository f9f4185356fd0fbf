"""Fields that chat completions and completions share, and their conversion to SamplingParams.

Pure. What is known but not supported yet is a clear error unless its value changes nothing; what is unknown is
accepted and ignored, as clients expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.field_errors import invalid_fields_error
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS
from trio_llm.quoting import quote
from trio_llm.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestOutputKind,
    SamplingParams,
)

__all__ = [
    "NOT_SUPPORTED",
    "CommonFields",
    "ModelRequest",
    "Neutral",
    "RequestBody",
    "StreamOptions",
    "only",
    "parse_body",
    "sampling_params",
]


class RequestBody(BaseModel):
    """A JSON object. Numbers are numbers: no text, no bool in their place. Unknown fields are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    not_supported: ClassVar[Mapping[str, Neutral]] = {}
    """Fields that would change the answer and cannot be done, each with the values that change nothing."""

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that do not go together."""


RequestId = Annotated[str | None, Field(pattern=r"\A[A-Za-z0-9_.:/+=@-]{1,128}\z")]
"""It becomes a header of the answer."""


class StreamOptions(RequestBody):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ModelRequest(RequestBody):
    """Fields of every request to the model."""

    model: str | None = None
    timeout: float | None = None
    request_id: RequestId = None


class CommonFields(ModelRequest):
    """Fields of every generating request. Ranges are checked by SamplingParams."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[int] | None, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] = None
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS)] = None
    prompt_logprobs: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # JSON has no other keys than strings.
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=MAX_LOGIT_BIAS_TOKENS)] = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] = None

    def check_together(self) -> None:
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


Body = TypeVar("Body", bound=RequestBody)


def parse_body(model: type[Body], body: Mapping[str, Any]) -> Body:
    """The request in a JSON object.

    Raises:
        InvalidRequestError: a field has the wrong type, a value that is not supported, or does not go with another
            one; `param` names it.
    """
    _check_supported(body, model.not_supported)
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise invalid_fields_error(error, model.model_fields) from None
    request.check_together()
    return request


# ------------------------------------------------------------------------------- fields not supported

Neutral = Callable[[Any], bool]
"""Whether a value of a field that is not supported changes nothing."""


def only(*values: Any) -> Neutral:
    """Null, or one of these values, with its very type: true is not 1, though Python says so."""
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in values)


def _number(neutral: float) -> Neutral:
    return lambda value: (
        value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value == neutral)
    )


NOT_SUPPORTED: Mapping[str, Neutral] = {
    "best_of": only(1),
    "length_penalty": _number(1),
    "logprob_token_ids": only([]),
    "prompt_embeds": only(),
    "use_beam_search": only(False),
    "response_format": only({"type": "text"}),
    "structured_outputs": only(),
    "guided_json": only(),
    "guided_regex": only(),
    "guided_choice": only(),
    "guided_grammar": only(),
    "truncate_prompt_tokens": only(),
    "return_tokens_as_token_ids": only(False),
    "return_prompt_text": only(False),
    "stream_interval": only(1),
    "repetition_detection": only(),
    "thinking_token_budget": only(-1),
    "logits_processors": only([]),
    "kv_transfer_params": only(),
    "priority": only(0),
    "mm_processor_kwargs": only({}),
}
"""Fields of both protocols, each with the values that are accepted because they change nothing."""


def _check_supported(body: Mapping[str, Any], not_supported: Mapping[str, Neutral]) -> None:
    """
    Raises:
        InvalidRequestError: a field of the table has a value that would change the answer.
    """
    for name in body.keys() & not_supported.keys():
        value = body[name]
        if not not_supported[name](value):
            raise InvalidRequestError(f"{name}: {quote(value)} is not supported by this server; leave it out", name)


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
