"""The JSON bodies of answers, as types. What writes them is checked against them, and the OpenAPI document shows them.

Pure. Used by the writers of answers and by the route table.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from trio_llm.frontend.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from trio_llm.outputs import FinishReason, WeightVersionSpan

__all__ = [
    "CachedTokens",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionChunkChoice",
    "EmbeddingEntry",
    "EmbeddingList",
    "Error",
    "MetricsBody",
    "ModelCard",
    "ModelList",
    "PoolingEntry",
    "PoolingList",
    "ProbeFailed",
    "ProbePassed",
    "ScoreEntry",
    "ScoreList",
    "UsageBody",
    "VectorUsage",
    "Version",
]


class CachedTokens(TypedDict):
    """Prompt tokens that were not computed, since the prefix cache had them."""

    cached_tokens: int


class VectorUsage(TypedDict):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens


class UsageBody(VectorUsage):
    """Tokens of all prompts and choices."""

    completion_tokens_details: None


class MetricsBody(TypedDict):
    """How long an answer with one choice took, with `--enable-per-request-metrics`. Null: it ended before that."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


# -------------------------------------------------------------------------------- chat completions


class ChatMessage(TypedDict):
    """The answer's text. The fields that are null are for what this server does not do yet."""

    role: Literal["assistant"]
    content: str
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: None
    reasoning_content: None


class ChatChoice(TypedDict):
    """One answer to the conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    weight_versions: NotRequired[list[WeightVersionSpan]]


class ChatCompletion(TypedDict):
    """The whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: None
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None
    metrics: MetricsBody | None


class ChatDelta(TypedDict):
    """What is new in a choice."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChunkChoice(TypedDict):
    """A piece of one choice. The last piece has the finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    weight_versions: NotRequired[list[WeightVersionSpan]]


class ChatChunk(TypedDict):
    """The data of one event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    usage: NotRequired[UsageBody]
    metrics: NotRequired[MetricsBody]
    system_fingerprint: NotRequired[None]


# ------------------------------------------------------------------------------------- completions


class CompletionChoice(TypedDict):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    weight_versions: NotRequired[list[WeightVersionSpan]]


class Completion(TypedDict):
    """All continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: None
    usage: UsageBody
    kv_transfer_params: None
    metrics: NotRequired[MetricsBody | None]


class CompletionChunkChoice(TypedDict):
    """A piece of one choice. The last piece has the finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    weight_versions: NotRequired[list[WeightVersionSpan]]


class CompletionChunk(TypedDict):
    """The data of one event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[UsageBody]
    metrics: NotRequired[MetricsBody]
    system_fingerprint: NotRequired[None]


# ----------------------------------------------------------------------------------------- vectors


class _VectorList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: VectorUsage


class EmbeddingEntry(TypedDict):
    """The embedding of one input: numbers, or base64 of float32 numbers, little-endian."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingList(_VectorList):
    """The embeddings of all inputs, in their order."""

    data: list[EmbeddingEntry]


class PoolingEntry(TypedDict):
    """The vector of one input: numbers, or base64 of float32 numbers, little-endian."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingList(_VectorList):
    """The vectors of all inputs, in their order."""

    data: list[PoolingEntry]


class ScoreEntry(TypedDict):
    """The cosine of the embeddings of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(_VectorList):
    """The scores of all pairs, in their order."""

    data: list[ScoreEntry]


# ---------------------------------------------------------------------------- the server and errors


class ModelCard(TypedDict):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[None]


class ModelList(TypedDict):
    """All served names; the first one is the main one."""

    object: Literal["list"]
    data: list[ModelCard]


class ProbePassed(TypedDict):
    """The answer of a probe with the status 200."""

    status: Literal["ready", "alive"]


class ProbeFailed(TypedDict):
    """The answer of a probe with the status 503: the state of the engine, and how far loading is."""

    status: Literal["loading", "recovering", "stalled", "asleep", "draining", "dead"]
    phase: str | None
    done: int | None
    total: int | None
    elapsed_s: float
    reason: str | None


class Version(TypedDict):
    """The version of this server."""

    version: str


class ErrorBody(TypedDict):
    """What is wrong. `code` is the HTTP status, `param` the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: int


class Error(TypedDict):
    """Any answer that is not a success."""

    error: ErrorBody
