"""RequestBody: how a JSON object becomes a checked request, and the fields that are refused.

Pure. Used by the request reader; the models of all bodies derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from trio_llm.config import DAY_S, MAX_DATA_PARALLEL_SIZE
from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.field_errors import MAX_PROBLEMS, invalid_fields_error
from trio_llm.frontend.http.openai.schemas import INT64_MAX, INT64_MIN, Schema, bounded
from trio_llm.frontend.requests.balancing import MAX_SESSION_ID_CHARS
from trio_llm.frontend.requests.input_processor import check_priority
from trio_llm.tokenization import TokenizationParams, TruncationSide

__all__ = ["ModelRequest", "Neutral", "RequestBody", "WholeNumber", "only", "parse_body"]


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_as_int)]
"""An integer, also if it is written as 2.0: JSON makes no difference."""


# ------------------------------------------------------------------------------- fields not supported


class Neutral:
    """The values of a field that is not supported which change nothing, besides null."""

    def __init__(self, *values: Any) -> None:
        self.values: Final = values

    def accepts(self, value: Any) -> bool:
        """`value` changes nothing. As in JSON, 1 is 1.0 but not true."""
        return value is None or any(_is_same(value, one) for one in self.values)

    def schema(self) -> Schema:
        """The values that are accepted."""
        return {"enum": [None, *self.values], "description": "Not supported. These values change nothing."}


def only(*values: Any) -> Neutral:
    """These values change nothing, and null does not either."""
    return Neutral(*values)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _check_supported(body: Mapping[str, Any], not_supported: Mapping[str, Neutral]) -> None:
    """
    Raises:
        InvalidRequestError: fields of the table have values that would change the answer. It lists them in the order
            of the table.
    """
    refused = [name for name, neutral in not_supported.items() if name in body and not neutral.accepts(body[name])]
    if not refused:
        return
    shown = [_describe(name, not_supported[name]) for name in refused[:MAX_PROBLEMS]]
    if len(refused) > MAX_PROBLEMS:
        shown.append(f"{len(refused) - MAX_PROBLEMS} more fields")
    *others, last = shown
    text = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    leave = "them" if others else "it"
    raise InvalidRequestError(f"{text} not supported by this server; leave {leave} out", refused[0])


def _describe(name: str, neutral: Neutral) -> str:
    values = [msgspec.json.encode(value).decode() for value in neutral.values if value not in ([], {}, "")]
    return f"{name} (other than {' or '.join(values)})" if values else name


# ------------------------------------------------------------------------------------------- bodies


class RequestBody(BaseModel):
    """A JSON object. Numbers are numbers: no text, no bool in their place. Unknown fields are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    not_supported: ClassVar[Mapping[str, Neutral]] = {}
    """Fields that would change the answer and cannot be done, each with the values that change nothing."""
    rules: ClassVar[tuple[Schema, ...]] = ()
    """The conditions of `check_together`, as JSON Schema."""

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that do not go together."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["properties"] |= {name: neutral.schema() for name, neutral in cls.not_supported.items()}
        if cls.rules:
            schema["allOf"] = list(cls.rules)
        return schema


_TRUNCATION: Final[Schema] = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": INT64_MAX}, {"const": -1}, {"type": "null"}]
}


class ModelRequest(RequestBody):
    """Fields of every request to the model."""

    model: str | None = None
    timeout: Annotated[float | None, bounded(above=0, most=DAY_S)] = None
    # It becomes a header of the answer. The `$` of ECMA-262 and of pydantic stands for the very end.
    request_id: Annotated[str | None, Field(pattern="^[A-Za-z0-9_.:/+=@-]{1,128}$")] = None
    data_parallel_rank: Annotated[WholeNumber | None, bounded(0, MAX_DATA_PARALLEL_SIZE - 1)] = None
    session_id: Annotated[str | None, Field(min_length=1, max_length=MAX_SESSION_ID_CHARS)] = None
    priority: Annotated[WholeNumber | None, bounded(INT64_MIN, INT64_MAX)] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[WholeNumber | None, WithJsonSchema(_TRUNCATION)] = None
    truncation_side: Annotated[str | None, WithJsonSchema({"enum": [*get_args(TruncationSide), None]})] = None

    def check_together(self) -> None:
        """As its base, and for values that pydantic does not judge."""
        if self.priority is not None:
            check_priority(self.priority)
        if self.data_parallel_rank is not None and not 0 <= self.data_parallel_rank < MAX_DATA_PARALLEL_SIZE:
            most = MAX_DATA_PARALLEL_SIZE - 1
            raise InvalidRequestError(f"data_parallel_rank must be from 0 to {most}", "data_parallel_rank")
        _ = self.tokenization

    @property
    def tokenization(self) -> TokenizationParams:
        """How the prompts become tokens. Raises InvalidRequestError."""
        return TokenizationParams(
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side="left" if self.truncation_side is None else self.truncation_side,  # type: ignore[arg-type]
        )


Body = TypeVar("Body", bound=RequestBody)


def parse_body(model: type[Body], body: Mapping[str, Any]) -> Body:
    """The request in a JSON object.

    Raises:
        InvalidRequestError: a field has the wrong type, a value that is not supported, or does not go with another
            one; `param` names it.
    """
    _check_supported(body, model.not_supported)
    request = _validate(model, body)
    if isinstance(request, InvalidRequestError):
        raise request
    request.check_together()
    return request


def _validate(model: type[Body], body: Mapping[str, Any]) -> Body | InvalidRequestError:
    """The request, or the error to raise where pydantic's own, which holds the body, is gone."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        return invalid_fields_error(error, model.model_fields)
