"""InFlightRequest: a registered request with its mailbox and its clock, and what the statistics say about it.

Kept by `RequestRegistry`. The request's stream and the output handler look at it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from trio_llm.frontend.requests.collector import RepeatingCollector, RequestOutputCollector
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.parallel_sampling import Family
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.frontend.statistics.stats import FinishedRequestStats
from trio_llm.outputs import FinishReason, RequestMetrics
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["AnswerProgress", "InFlightRequest", "make_choices", "make_finished_stats", "make_metrics"]


@dataclass(slots=True, eq=False)
class AnswerProgress:
    """What the choices of one answer have come to, together."""

    num_choices: int = 1
    """As the caller asked. Equal ones are computed once."""
    num_open: int = 1
    """Of those that are computed: not over."""
    max_num_tokens: int = 0
    """Of the longest one that is over."""
    first: RequestClock | None = None
    """Of the choice that had the first token."""

    def note_first_token(self, clock: RequestClock) -> None:
        """A choice has got its first token."""
        if self.first is None:
            self.first = clock

    def end_choice(self, num_tokens: int) -> bool:
        """A choice is over. Returns whether it is the last one."""
        self.num_open -= 1
        self.max_num_tokens = max(self.max_num_tokens, num_tokens)
        return self.num_open == 0


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A registered request. With n > 1 there is one for each choice, and all share the mailbox."""

    state: RequestState
    collector: RequestOutputCollector
    clock: RequestClock
    engine_index: int = 0
    """The engine that computes it. All choices of an answer and all inputs of a session go to the same one."""
    has_first_token: bool = False
    """The first token of its answer has come; for a session: of the newest answer."""
    counted_from_s: float = 0.0
    """When the seconds of its deadline began; Trio's clock."""
    answer: AnswerProgress = field(default_factory=AnswerProgress)
    """With n > 1 all choices share it, too."""

    @property
    def is_unfinished(self) -> bool:
        """It is not over for its reader."""
        status = self.state.status
        return status is not RequestStatus.ABORTING and status is not RequestStatus.GONE


def make_choices(
    request: EngineCoreRequest,
    children: Sequence[EngineCoreRequest],
    processor: OutputProcessor,
    external_id: str,
    arrived_s: float,
    engine_index: int,
) -> list[InFlightRequest]:
    """The choices of an answer, not registered yet. They share one mailbox, in the form that the answer needs.

    Args:
        children: what `fan_out` gives for `request`.
    """
    kind, num_choices = request.params.output_kind, request.params.n
    family = Family([child.request_id for child in children], kind) if len(children) > 1 else None
    is_repeated = len(children) < num_choices
    collector = RepeatingCollector(kind, num_choices) if is_repeated else RequestOutputCollector(kind)
    answer = AnswerProgress(num_choices, num_open=len(children))
    now_s = trio.current_time()
    return [
        InFlightRequest(
            processor.make_state(child, external_id, index=index, family=family),
            collector,
            RequestClock(arrived_s),
            answer=answer,
            engine_index=engine_index,
            counted_from_s=now_s,
        )
        for index, child in enumerate(children)
    ]


def make_finished_stats(request: InFlightRequest, reason: FinishReason, now_s: float) -> FinishedRequestStats:
    """What the statistics say about a request that is over for its reader now. Once per request."""
    state, clock, answer = request.state, request.clock, request.answer
    is_pooling, is_session = state.request.pooling_params is not None, state.request.resumable
    ends_answer = answer.end_choice(state.num_tokens) and not is_pooling
    return FinishedRequestStats(
        request_id=state.external_id,
        finish_reason=reason,
        num_prompt_tokens=state.num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_output_tokens=state.num_tokens,
        max_tokens=None if is_pooling else state.request.params.max_tokens,
        e2e_latency_s=now_s - clock.arrived_s,
        time_to_first_token_s=None if is_pooling else clock.time_to_first_token_s,
        queue_time_s=None if is_session else clock.queue_time_s,
        prefill_time_s=None if is_session else clock.prefill_time_s,
        decode_time_s=None if is_session or is_pooling else clock.decode_time_s,
        num_preemptions=state.num_preemptions,
        num_choices=answer.num_choices if ends_answer else None,
        max_num_output_tokens=answer.max_num_tokens if ends_answer else None,
    )


def make_metrics(request: InFlightRequest, now_s: float) -> RequestMetrics:
    """What the reader of an answer learns of its times, with its last output."""
    first, now_unix_s = request.answer.first, time.time()
    arrived_s = request.clock.arrived_s
    return RequestMetrics(
        arrival_time=now_unix_s - (now_s - arrived_s),
        total_time_s=now_s - arrived_s,
        queue_time_s=None if first is None else first.queue_time_s,
        time_to_first_token_s=None if first is None else first.time_to_first_token_s,
        generation_time_s=None if first is None or first.first_token_s is None else now_s - first.first_token_s,
    )
