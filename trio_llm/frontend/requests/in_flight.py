"""InFlightRequest: a registered request with its mailbox and its clock, and what the statistics say about it.

Kept by `RequestRegistry`. The request's stream and the output handler look at it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from trio_llm.frontend.requests.balancing import ANYWHERE, Routing
from trio_llm.frontend.requests.collector import RepeatingCollector, RequestOutputCollector
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.parallel_sampling import Family
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.frontend.statistics.stats import FinishedRequestStats
from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.outputs import FinishReason, RequestMetrics
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest
from trio_llm.wire.work import measure_work

__all__ = ["InFlightRequest", "make_choices", "make_finished_stats", "make_metrics"]


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A registered request. With n > 1 there is one for each choice, and all share the mailbox."""

    state: RequestState
    collector: RequestOutputCollector
    clock: RequestClock
    report: RequestReport
    """With n > 1 all choices share it, too."""
    engine_index: int = 0
    """The engine that computes it. All choices of an answer and all inputs of a session go to the same one, until that
    dies."""
    routing: Routing = ANYWHERE
    has_first_token: bool = False
    """The first token of its answer has come; for a session: of the newest answer."""
    counted_from_s: float = 0.0
    """When the seconds of its deadline began; Trio's clock."""
    num_sent_tokens: int = 0
    """Tokens that its engine had to compute when it was sent last. With several engines."""
    work: int = 0
    """What it counts with in the work of its engine. With several engines."""

    @property
    def is_unfinished(self) -> bool:
        """It is not over for its reader."""
        status = self.state.status
        return status is not RequestStatus.ABORTING and status is not RequestStatus.GONE

    def measure_work(self) -> int:
        """What an engine still has to do for it; see `wire.work`."""
        state = self.state
        if state.status is not RequestStatus.SENT and state.status is not RequestStatus.UNSENT:
            return 0
        request = state.request
        if state.num_tokens_when_sent is None:
            num_prompt_tokens = state.num_prompt_tokens + state.num_tokens
        else:
            num_prompt_tokens = self.num_sent_tokens if state.num_tokens == state.num_tokens_when_sent else 0
        if state.family is not None and state.index:
            num_prompt_tokens = 0  # the first choice's engine finds it in the cache
        num_answer_tokens = 0 if request.pooling_params else (request.params.max_tokens or 0) - len(state.token_ids)
        return measure_work(num_prompt_tokens, num_answer_tokens)


def make_choices(
    request: EngineCoreRequest,
    children: Sequence[EngineCoreRequest],
    processor: OutputProcessor,
    report: RequestReport,
    engine_index: int,
    routing: Routing,
) -> list[InFlightRequest]:
    """The choices of an answer, not registered yet. They share one mailbox, in the form that the answer needs.

    Args:
        children: what `fan_out` gives for `request`.
    """
    kind, num_choices = request.params.output_kind, request.params.n
    family = Family([child.request_id for child in children], kind) if len(children) > 1 else None
    is_repeated = len(children) < num_choices
    collector = RepeatingCollector(kind, num_choices) if is_repeated else RequestOutputCollector(kind)
    report.num_open = len(children)
    now_s = trio.current_time()
    return [
        InFlightRequest(
            processor.make_state(child, report.external_id, index=index, family=family),
            collector,
            RequestClock(report.arrived_s),
            report,
            engine_index,
            routing,
            counted_from_s=now_s,
        )
        for index, child in enumerate(children)
    ]


def make_finished_stats(
    request: InFlightRequest, reason: FinishReason, now_s: float, *, knows_last_token: bool
) -> FinishedRequestStats:
    """What is said about a request that is over for its reader now, before its report hears of the end.

    Args:
        knows_last_token: the time of each token was taken.
    """
    state, clock, report = request.state, request.clock, request.report
    is_pooling, is_session = state.request.pooling_params is not None, state.request.resumable
    answer = report.params if report.num_open == 1 and isinstance(report.params, SamplingParams) else None
    most_tokens = max(state.num_tokens, *(end.num_output_tokens for end in report.ends), 0)
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
        decode_time_s=clock.decode_time_s if knows_last_token and not (is_session or is_pooling) else None,
        num_preemptions=state.num_preemptions,
        num_choices=None if answer is None else answer.n,
        max_num_output_tokens=None if answer is None else most_tokens,
    )


def make_metrics(request: InFlightRequest, now_s: float) -> RequestMetrics:
    """What the reader of an answer learns of its times, with its last output."""
    first, arrived_s = request.report.first, request.clock.arrived_s
    return RequestMetrics(
        arrival_time=time.time() - (now_s - arrived_s),
        total_time_s=now_s - arrived_s,
        queue_time_s=None if first is None else first.queue_time_s,
        time_to_first_token_s=None if first is None else first.time_to_first_token_s,
        generation_time_s=None if first is None or first.first_token_s is None else now_s - first.first_token_s,
    )
