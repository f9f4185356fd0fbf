"""PooledOutput: the vector of a pooling request, on its way from the engine's row to the reader.

Pure. Used by the output processor and by `encode`.
"""

from __future__ import annotations

from typing import Final

from trio_llm.errors import EngineGenerateError
from trio_llm.outputs import CompletionOutput, RequestOutput
from trio_llm.wire.messages import EngineCoreOutput

__all__ = ["PooledOutput", "make_pooled_output"]

_NUMBER_BYTES: Final = 4


class PooledOutput(RequestOutput, gc=False):
    """The one output of a pooling request, in the form that the collector carries."""

    data: bytes = b""
    """As `PoolingOutput.data`."""


def make_pooled_output(
    external_id: str, num_prompt_tokens: int, row: EngineCoreOutput, weight_version: str
) -> PooledOutput:
    """What a reader gets for the engine's row.

    Raises:
        EngineGenerateError: it has no vector.
    """
    if not row.pooled or len(row.pooled) % _NUMBER_BYTES:
        raise EngineGenerateError("the engine ended the request without a vector")
    end = CompletionOutput(0, "", [], None, row.finish_reason)
    return PooledOutput(
        external_id, num_prompt_tokens, row.num_cached_tokens, [end], True, None, weight_version, data=row.pooled
    )
