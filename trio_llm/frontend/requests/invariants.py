"""check_requests: what holds between the fields of the unfinished requests whenever no method of the registry runs.

Pure. Used by `RequestRegistry.check`, which tests call after every step.
"""

from __future__ import annotations

from collections.abc import Mapping

from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.lifecycle import RequestStatus

__all__ = ["check_requests"]

_IN_ENGINE = {
    RequestStatus.UNSENT: False,
    RequestStatus.SENT: True,
    RequestStatus.EXPIRED: False,
    RequestStatus.ABORTING: True,
}
"""Whether the engine has a request. A session that is IDLE may be there or not."""


def check_requests(in_flight: Mapping[str, InFlightRequest]) -> None:
    """
    Args:
        in_flight: by internal id.

    Raises:
        AssertionError: something does not hold.
    """
    for request_id, request in in_flight.items():
        assert request_id == request.state.request_id
        _check_one(request)
        _check_family(request, in_flight)
        _check_report(request, in_flight)


def _check_one(request: InFlightRequest) -> None:
    state = request.state
    name = f"{state.request_id} ({state.status.name})"
    assert state.status is not RequestStatus.GONE, f"{name} is still registered"
    if state.status is RequestStatus.IDLE:
        assert state.request.resumable, f"{name} is no session"
    else:
        assert (state.num_tokens_when_sent is not None) == _IN_ENGINE[state.status], name
    assert (state.num_tokens_when_sent or 0) <= state.num_tokens, name
    assert len(state.token_ids) <= state.num_tokens, name
    assert not request.has_first_token or state.num_tokens > 0, f"{name} has no token"
    assert request.clock.first_token_s is not None or state.num_tokens == 0 or not request.is_unfinished, name
    assert state.status is not RequestStatus.EXPIRED or request.collector.must_resubmit, f"{name} is sent never again"


def _check_family(request: InFlightRequest, in_flight: Mapping[str, InFlightRequest]) -> None:
    state, family = request.state, request.state.family
    if family is None:
        return
    assert family.child_ids[state.index] == state.request_id
    assert not request.is_unfinished or state.index in family.unfinished, f"{state.request_id} has had its end"
    for sibling_id in family.child_ids:
        sibling = in_flight.get(sibling_id)
        if sibling is not None:
            assert sibling.state.family is family
            assert sibling.collector is request.collector, "the choices of an answer share one mailbox"
            assert sibling.engine_index == request.engine_index, "the choices of an answer share one engine"


def _check_report(request: InFlightRequest, in_flight: Mapping[str, InFlightRequest]) -> None:
    report, family = request.report, request.state.family
    ids = [request.state.request_id] if family is None else family.child_ids
    members = [member for request_id in ids if (member := in_flight.get(request_id)) is not None]
    assert all(member.report is report for member in members), "the choices of an answer share one report"
    num_unfinished = sum(member.is_unfinished for member in members)
    assert report.num_open == num_unfinished, f"{report.external_id}: {report.num_open} open, {num_unfinished} run"
