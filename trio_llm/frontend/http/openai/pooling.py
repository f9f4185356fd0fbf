"""Bodies of /v1/embeddings, /pooling and /score, and their conversion to PoolingParams.

Pure. Used by their routes. The first is OpenAI's, the others are in the form of vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import WithJsonSchema

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.fields import ModelRequest, Neutral, only
from trio_llm.frontend.http.openai.prompts import prompt_schema
from trio_llm.pooling import PoolingParams

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
"""Vectors in one request: of `input`, or of both texts to compare."""

POOLING_NOT_SUPPORTED: Final[Mapping[str, Neutral]] = {
    "dimensions": only(),
    "truncate_prompt_tokens": only(),
    "messages": only(),
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "use_activation": only(True),
    "cache_salt": only(),
    "priority": only(0),
    "mm_processor_kwargs": only({}),
}
"""Fields of these paths, each with the values that are accepted because they change nothing."""

EncodingFormat = Literal["float", "base64"]


class VectorFields(ModelRequest):
    """Fields of all requests for vectors."""

    not_supported: ClassVar[Mapping[str, Neutral]] = POOLING_NOT_SUPPORTED

    pooling: str | None = None
    add_special_tokens: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """The tokenizer adds its own, such as the beginning of text."""
        return self.add_special_tokens is not False


class EmbeddingRequest(VectorFields):
    """Texts whose embeddings are wanted."""

    input: Annotated[Any, WithJsonSchema(prompt_schema(MAX_INPUTS))]
    encoding_format: EncodingFormat | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """Texts to embed or to classify."""

    task: str | None = None


_TEXTS: Final = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


class ScoreRequest(VectorFields):
    """Texts to compare: one with each of many, or pair by pair."""

    text_1: Annotated[Any, WithJsonSchema(_TEXTS)]
    text_2: Annotated[Any, WithJsonSchema(_TEXTS)]


def embedding_params(request: EmbeddingRequest) -> PoolingParams:
    """What /v1/embeddings asks for. Raises InvalidRequestError."""
    return _params(task="embed", pooling=request.pooling, normalize=request.normalize)


def pooling_params(request: PoolingRequest, tasks: Collection[str]) -> PoolingParams:
    """What /pooling asks for: without a task, classes from a model that has some, else embeddings.

    Args:
        tasks: of the model.

    Raises:
        InvalidRequestError: a value is wrong, or does not go with the task.
    """
    task = request.task or ("classify" if "classify" in tasks else "embed")
    return _params(task=task, pooling=request.pooling, normalize=request.normalize)


def score_params(request: ScoreRequest) -> PoolingParams:
    """What /score compares. Raises InvalidRequestError."""
    return _params(task="embed", pooling=request.pooling)


def pair_up(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Both sides of a comparison, each with as many texts as were sent: one, or as many as on the other side.

    Raises:
        InvalidRequestError: they are no such texts, or too many.
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
