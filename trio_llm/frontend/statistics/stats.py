"""What is counted per engine, and `StatLogger`, the base of what records it.

Pure. `trio_llm` exports what third parties need. docs/observability.md shows how to write a logger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trio_llm.config import EngineConfig
from trio_llm.outputs import FinishReason
from trio_llm.wire.messages import ModelConfig, SchedulerStats

__all__ = [
    "AggregateStatLogger",
    "FinishedRequestStats",
    "IterationStats",
    "StatLogger",
    "StatLoggerFactory",
    "StatLoggerSource",
]


@dataclass(slots=True, kw_only=True)
class FinishedRequestStats:
    """One request that ended. Each choice of an answer is one.

    Times are None where they have no meaning: what they end with did not happen, or the request was a session, which
    waits for its caller.
    """

    request_id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int | None
    """None: no answer was asked for, but a vector."""
    e2e_latency_s: float
    time_to_first_token_s: float | None
    """None: it ended before its first token."""
    queue_time_s: float | None = None
    """From its registration until the engine planned its first token."""
    prefill_time_s: float | None = None
    """From there to its first token; for a vector, to its end."""
    decode_time_s: float | None = None
    """From its first token to its last one."""
    num_preemptions: int | None = None
    """Times that it lost its KV blocks. None: it ended here, as by a stop string, and the engine has not said."""
    num_choices: int | None = None
    """Choices of the answer that it is the last one of. None: others of them are not over, or it was a vector."""
    max_num_output_tokens: int | None = None
    """Tokens of the longest one of these choices."""

    @property
    def inference_time_s(self) -> float | None:
        """From its first planned token to its last token, or to its vector."""
        if self.prefill_time_s is None or self.decode_time_s is None:
            return self.prefill_time_s if self.max_tokens is None else None
        return self.prefill_time_s + self.decode_time_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """The mean between two of its tokens. None: it has less than two."""
        if self.decode_time_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_time_s / (self.num_output_tokens - 1)


@dataclass(slots=True)
class IterationStats:
    """What one drained batch of engine outputs held."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token, or vector, came."""
    num_queried_tokens: int = 0
    """Prompt tokens that the prefix cache was asked for: those of these requests, but not of a session's later inputs,
    which follow what the session has."""
    num_cached_tokens: int = 0
    """How many of the queried tokens were in the cache when the request came."""
    num_generation_tokens: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_latency_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    """Per message of the engine, which is one per step: its prompt tokens and generated tokens, counted as above."""
    finished: list[FinishedRequestStats] = field(default_factory=list)
    num_restarts: int = 0
    """Engines that were started after another one had died."""
    engine_time_s: float = 0.0
    """The engine's clock when it sent the newest of these outputs; 0: it has sent none."""


class StatLogger:
    """Records statistics: derive from it and override what you need. Methods are called in tasks that serve requests:
    they must not block. One that raises is called no more, and a line in the log says so."""

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        """One drained batch of one engine. Keep neither argument's lists.

        Args:
            scheduler: the newest state of the engine's scheduler, if the batch had one. All zero: the engine is gone.
            engine_index: its rank.
        """

    def record_rejection(self, reason: str) -> None:
        """A request was refused for the load: `reason` is that of its OverloadedError. Called in the caller's task."""

    def record_engine_ready(self, model: ModelConfig, *, engine_index: int) -> None:
        """An engine has loaded its model. Called again when it was started again."""

    def record_operation(self, operation: str, seconds: float | None) -> None:
        """A call that changes all engines begins (None), or is over after so many seconds.

        Args:
            operation: `sleep` or `wake`.
        """

    def log(self) -> None:
        """Called every ten seconds and by `do_log_stats()`: write a line, if this logger writes any."""


class AggregateStatLogger(StatLogger):
    """The base of loggers of which one serves all engines, where only a class can be named, as in an entry point.

    Args:
        engine_indices: the ranks of all engines of this front end.
    """

    def __init__(self, config: EngineConfig, engine_indices: Sequence[int]) -> None:
        self.config = config
        self.engine_indices = engine_indices


StatLoggerFactory = Callable[[EngineConfig, int], StatLogger]
"""Makes the logger of one engine, given its rank: called once per engine."""
StatLoggerSource = StatLogger | StatLoggerFactory | type[AggregateStatLogger]
"""A logger for all engines, or what makes one per engine, or a class that is called once, with all indices."""
