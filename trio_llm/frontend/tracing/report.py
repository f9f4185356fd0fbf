"""RequestReport: what observers learn of one request, all its choices together. `RequestObserver`, who learns it.

Made by the submitter when a request is admitted. The registry adds the end of each choice, and the last one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.frontend.statistics.stats import FinishedRequestStats
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestObserver", "RequestReport"]


def _tell_nobody(report: RequestReport) -> None:
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class RequestReport:
    """One request, from its arrival to its end."""

    external_id: str
    params: SamplingParams | PoolingParams
    """With their defaults. A session's are for inputs that bring none."""
    arrived_s: float
    """Trio's clock. Before the request was made, if its caller has named the time of arrival."""
    trace_headers: Mapping[str, str] | None = None
    """`traceparent`, and `tracestate` if there is one."""
    trace_context: object = None
    """What the request's span is a child of. The tracer's own, which sets it when the request arrives."""
    on_end: Callable[[RequestReport], None] = _tell_nobody
    """Called once, when all choices are over."""
    num_open: int = 1
    """Choices that are not over."""
    ends: list[FinishedRequestStats] = field(default_factory=list)
    """What the statistics say about each choice that is over, in the order of their ends. At least one at the end."""
    first: RequestClock | None = None
    """Of the choice that had the first token."""
    error: BaseException | None = None
    """What the reader gets in place of the rest of its answer."""

    def note_first_token(self, clock: RequestClock) -> None:
        """A choice has got its first token."""
        if self.first is None:
            self.first = clock

    def end_choice(self, stats: FinishedRequestStats, error: BaseException | None) -> None:
        """One more choice is over for its reader."""
        self.ends.append(stats)
        self.error = self.error or error
        self.num_open -= 1
        assert self.num_open >= 0, f"{self.external_id} has ended more often than it has choices"
        if self.num_open == 0:
            self.on_end(self)

    # -------------------------------------------------------------------- of a request that is over

    @property
    def finish_reasons(self) -> list[str]:
        """One per choice that was computed, in the order of their ends."""
        return [end.finish_reason for end in self.ends]

    @property
    def has_failed(self) -> bool:
        """The reader gets an error, or would if it had not left."""
        return self.error is not None or "error" in self.finish_reasons

    @property
    def was_aborted(self) -> bool:
        """It was left or aborted before all choices were complete."""
        return "abort" in self.finish_reasons

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt counts once. For a session: tokens of all inputs."""
        return self.ends[0].num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the engine's prefix cache when the request came."""
        # The choices after the first one find what the first one has computed.
        return min(end.num_cached_tokens for end in self.ends)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of all choices. Equal ones are computed once, and count once."""
        return sum(end.num_output_tokens for end in self.ends)

    @property
    def e2e_latency_s(self) -> float:
        """Seconds from the arrival to the end of the last choice."""
        return self.ends[-1].e2e_latency_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token of any choice. None: there was none."""
        return min((s for end in self.ends if (s := end.time_to_first_token_s) is not None), default=None)

    # The times in the engine, as `FinishedRequestStats` has them. None where they have no meaning, as for a session.

    @property
    def queue_time_s(self) -> float | None:
        """Until the engine planned a token of the first choice."""
        return self._leader.queue_time_s

    @property
    def prefill_time_s(self) -> float | None:
        """From there to the first token of any choice, or to the vector."""
        return self._leader.prefill_time_s

    @property
    def decode_time_s(self) -> float | None:
        """From there to the last token of any choice."""
        first_token_s = self._leader.time_to_first_token_s
        last_tokens_s = [
            end.time_to_first_token_s + end.decode_time_s
            for end in self.ends
            if end.time_to_first_token_s is not None and end.decode_time_s is not None
        ]
        return None if first_token_s is None or not last_tokens_s else max(last_tokens_s) - first_token_s

    @property
    def _leader(self) -> FinishedRequestStats:
        """The choice that had the first token."""
        latency_s = self.time_to_first_token_s
        return next(end for end in self.ends if end.time_to_first_token_s == latency_s)


class RequestObserver(Protocol):
    """Learns of single requests. Synchronous; must not block. One that raises is told nothing more."""

    def on_arrival(self, report: RequestReport, request: EngineCoreRequest, text: str | None) -> None:
        """A request was admitted. Called in its caller's task.

        Args:
            request: as the engine gets it, but for the choices of an answer. A session's has no prompt yet.
            text: the prompt, if it came as text.
        """
        ...

    def on_end(self, report: RequestReport) -> None:
        """An admitted request is over: finished, aborted, left by its reader, or failed. Once per request."""
        ...
