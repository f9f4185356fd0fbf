"""Bodies of /v1/embeddings, /pooling and /score, and their conversion to PoolingParams.

Pure. Used by their routes. The first is OpenAI's, the others are in the form of vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.body import ModelRequest, Neutral, only
from trio_llm.frontend.http.openai.schemas import NON_EMPTY, Schema, implies, one_or_many, prompt_schema
from trio_llm.pooling import PoolingKind, PoolingParams, PoolingTask

__all__ = [
    "MAX_INPUTS",
    "POOLING_NOT_SUPPORTED",
    "EmbeddingRequest",
    "PoolingRequest",
    "ScoreRequest",
    "VectorFields",
    "embedding_params",
    "pair_up",
    "pooling_params",
    "score_params",
]

MAX_INPUTS: Final = 2048
"""Vectors in one request: for `input`, or for both texts to compare."""

POOLING_NOT_SUPPORTED: Final[Mapping[str, Neutral]] = {
    "dimensions": only(),
    "messages": only([]),
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "use_activation": only(True),
    "cache_salt": only(),
    "mm_processor_kwargs": only({}),
}
"""Fields of these paths, each with the values that are accepted because they change nothing."""

EncodingFormat = Literal["float", "base64"]


class VectorFields(ModelRequest):
    """Fields of all requests for vectors."""

    not_supported: ClassVar[Mapping[str, Neutral]] = POOLING_NOT_SUPPORTED

    pooling: Annotated[str | None, WithJsonSchema({"enum": [*get_args(PoolingKind), None]})] = None


class EmbeddingRequest(VectorFields):
    """Texts whose embeddings are wanted."""

    input: Annotated[Any, WithJsonSchema(prompt_schema(MAX_INPUTS))]
    encoding_format: EncodingFormat | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """Texts to embed or to classify."""

    rules: ClassVar[tuple[Schema, ...]] = (
        implies("task", {"const": "classify"}, "pooling", {"enum": ["last", None]}, is_needed=False),
        implies("task", {"const": "classify"}, "normalize", {"enum": [True, None]}, is_needed=False),
    )

    task: Annotated[str | None, WithJsonSchema({"enum": [*get_args(PoolingTask), None]})] = None


class ScoreRequest(VectorFields):
    """Texts to compare: one with each of many, or pair by pair."""

    text_1: Annotated[Any, WithJsonSchema(one_or_many(NON_EMPTY, MAX_INPUTS - 1))]
    text_2: Annotated[Any, WithJsonSchema(one_or_many(NON_EMPTY, MAX_INPUTS - 1))]


def embedding_params(request: EmbeddingRequest) -> PoolingParams:
    """The parameters of /v1/embeddings. Raises InvalidRequestError."""
    return _params(task="embed", pooling=request.pooling, normalize=request.normalize)


def pooling_params(request: PoolingRequest, tasks: Collection[str]) -> PoolingParams:
    """The parameters of /pooling. Without a task they ask for classes if the model has some, else for an embedding.

    Args:
        tasks: those of the served model.

    Raises:
        InvalidRequestError: a value is wrong, or does not go with the task.
    """
    task = ("classify" if "classify" in tasks else "embed") if request.task is None else request.task
    return _params(task=task, pooling=request.pooling, normalize=request.normalize)


def score_params(request: ScoreRequest) -> PoolingParams:
    """The parameters of /score. Raises InvalidRequestError."""
    return _params(task="embed", pooling=request.pooling)


def pair_up(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Both sides of a comparison, each with as many texts as were sent: one, or as many as on the other side.

    Raises:
        InvalidRequestError: a side has something else, or both have too many.
    """
    first, second = _texts("text_1", request.text_1), _texts("text_2", request.text_2)
    if len(first) != 1 and len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; send one in text_1, or as many as in text_2",
            "text_1",
        )
    if len(first) + len(second) > MAX_INPUTS:
        raise InvalidRequestError(
            f"{len(first) + len(second)} texts in text_1 and text_2 are over the limit of {MAX_INPUTS}", "text_2"
        )
    return first, second


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, none of them empty", name)
    return texts


def _params(**fields: Any) -> PoolingParams:
    return PoolingParams(**{name: value for name, value in fields.items() if value is not None})
