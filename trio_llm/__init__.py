"""trio_llm: serve large language models from Trio. The public names.

They are loaded when first used: the engine process imports this package and must not import Trio, and `trio-llm --help`
must not wait for anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from trio_llm.version import __version__

if TYPE_CHECKING:
    from trio_llm.config import EngineConfig, ServerConfig
    from trio_llm.errors import (
        BodyTooLargeError,
        CodecError,
        ConfigError,
        EngineDeadError,
        EngineError,
        EngineGenerateError,
        EngineStartupError,
        EngineUnavailableError,
        FrontEndDeadError,
        InvalidRequestError,
        KVEventsLostError,
        ModelNotFoundError,
        NotSupportedError,
        OverloadedError,
        PromptTooLongError,
        QueuedTokensError,
        QueueFullError,
        RequestTimeoutError,
        TrioLLMError,
    )
    from trio_llm.frontend.async_llm import AsyncLLM
    from trio_llm.frontend.engine_client import EngineClient
    from trio_llm.frontend.http.serve import serve
    from trio_llm.frontend.kv_events import KVEventBatch
    from trio_llm.frontend.open_llm import open_llm
    from trio_llm.frontend.requests.sessions import StreamingInput
    from trio_llm.frontend.statistics.logging_logger import LoggingStatLogger
    from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
    from trio_llm.frontend.statistics.stats import (
        AggregateStatLogger,
        FinishedRequestStats,
        IterationStats,
        StatLogger,
    )
    from trio_llm.outputs import CompletionOutput, PoolingOutput, RequestMetrics, RequestOutput
    from trio_llm.pooling import PoolingParams
    from trio_llm.sampling import RequestOutputKind, SamplingParams
    from trio_llm.tokenization import TokenizationParams
    from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, SchedulerStats

_HOMES: Final = {
    "AggregateStatLogger": "trio_llm.frontend.statistics.stats",
    "AllBlocksCleared": "trio_llm.wire.messages",
    "AsyncLLM": "trio_llm.frontend.async_llm",
    "BlockRemoved": "trio_llm.wire.messages",
    "BlockStored": "trio_llm.wire.messages",
    "BodyTooLargeError": "trio_llm.errors",
    "CodecError": "trio_llm.errors",
    "CompletionOutput": "trio_llm.outputs",
    "ConfigError": "trio_llm.errors",
    "EngineClient": "trio_llm.frontend.engine_client",
    "EngineConfig": "trio_llm.config",
    "EngineDeadError": "trio_llm.errors",
    "EngineError": "trio_llm.errors",
    "EngineGenerateError": "trio_llm.errors",
    "EngineStartupError": "trio_llm.errors",
    "EngineUnavailableError": "trio_llm.errors",
    "FinishedRequestStats": "trio_llm.frontend.statistics.stats",
    "FrontEndDeadError": "trio_llm.errors",
    "InvalidRequestError": "trio_llm.errors",
    "IterationStats": "trio_llm.frontend.statistics.stats",
    "KVEventBatch": "trio_llm.frontend.kv_events",
    "KVEventsLostError": "trio_llm.errors",
    "LoggingStatLogger": "trio_llm.frontend.statistics.logging_logger",
    "ModelNotFoundError": "trio_llm.errors",
    "NotSupportedError": "trio_llm.errors",
    "OverloadedError": "trio_llm.errors",
    "PoolingOutput": "trio_llm.outputs",
    "PoolingParams": "trio_llm.pooling",
    "PrometheusStatLogger": "trio_llm.frontend.statistics.prometheus",
    "PromptTooLongError": "trio_llm.errors",
    "QueueFullError": "trio_llm.errors",
    "QueuedTokensError": "trio_llm.errors",
    "RequestMetrics": "trio_llm.outputs",
    "RequestOutput": "trio_llm.outputs",
    "RequestOutputKind": "trio_llm.sampling",
    "RequestTimeoutError": "trio_llm.errors",
    "SamplingParams": "trio_llm.sampling",
    "SchedulerStats": "trio_llm.wire.messages",
    "ServerConfig": "trio_llm.config",
    "StatLogger": "trio_llm.frontend.statistics.stats",
    "StreamingInput": "trio_llm.frontend.requests.sessions",
    "TokenizationParams": "trio_llm.tokenization",
    "TrioLLMError": "trio_llm.errors",
    "open_llm": "trio_llm.frontend.open_llm",
    "serve": "trio_llm.frontend.http.serve",
}

__all__ = [
    "AggregateStatLogger",
    "AllBlocksCleared",
    "AsyncLLM",
    "BlockRemoved",
    "BlockStored",
    "BodyTooLargeError",
    "CodecError",
    "CompletionOutput",
    "ConfigError",
    "EngineClient",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineGenerateError",
    "EngineStartupError",
    "EngineUnavailableError",
    "FinishedRequestStats",
    "FrontEndDeadError",
    "InvalidRequestError",
    "IterationStats",
    "KVEventBatch",
    "KVEventsLostError",
    "LoggingStatLogger",
    "ModelNotFoundError",
    "NotSupportedError",
    "OverloadedError",
    "PoolingOutput",
    "PoolingParams",
    "PrometheusStatLogger",
    "PromptTooLongError",
    "QueueFullError",
    "QueuedTokensError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimeoutError",
    "SamplingParams",
    "SchedulerStats",
    "ServerConfig",
    "StatLogger",
    "StreamingInput",
    "TokenizationParams",
    "TrioLLMError",
    "__version__",
    "open_llm",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
