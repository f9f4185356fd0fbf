"""Answers with vectors and scores, in the shapes of OpenAI's and vLLM's API.

Pure. Used by the pooling routes, which join the pieces: a list of thousands of vectors is megabytes of JSON, and other
tasks get a turn between its entries.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import msgspec

from trio_llm.frontend.http.openai.answer_bodies import EmbeddingEntry, PoolingEntry, ScoreEntry, VectorUsage
from trio_llm.frontend.http.openai.responses import AnswerHead
from trio_llm.outputs import PoolingOutput

__all__ = ["embedding_entries", "list_beginning", "list_end", "pooling_entries", "score_entries"]

_encode = msgspec.json.Encoder().encode


def list_beginning(head: AnswerHead) -> bytes:
    """The body up to the first entry."""
    fields = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
    return _encode(fields)[:-1] + b',"data":['


def list_end(outputs: Sequence[PoolingOutput]) -> bytes:
    """The body after the last entry, which has the usage."""
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    usage: VectorUsage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    return b'],"usage":' + _encode(usage) + b"}"


def embedding_entries(outputs: Sequence[PoolingOutput], *, as_base64: bool) -> Iterator[bytes]:
    """OpenAI's entries. In base64 the numbers are float32, little-endian."""
    for index, output in enumerate(outputs):
        entry: EmbeddingEntry = {"index": index, "object": "embedding", "embedding": _vector(output, as_base64)}
        yield _encode(entry)


def pooling_entries(outputs: Sequence[PoolingOutput], *, as_base64: bool) -> Iterator[bytes]:
    """vLLM's entries."""
    for index, output in enumerate(outputs):
        entry: PoolingEntry = {"index": index, "object": "pooling", "data": _vector(output, as_base64)}
        yield _encode(entry)


def score_entries(scores: Iterator[float]) -> Iterator[bytes]:
    """vLLM's entries, each made when it is asked for."""
    for index, score in enumerate(scores):
        entry: ScoreEntry = {"index": index, "object": "score", "score": score}
        yield _encode(entry)


def _vector(output: PoolingOutput, as_base64: bool) -> list[float] | str:
    return base64.b64encode(output.data).decode("ascii") if as_base64 else output.values
