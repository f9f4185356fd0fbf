"""make_report: what the submitter gives the registry along with a request, for tests that have no submitter."""

from __future__ import annotations

from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.sampling import SamplingParams

__all__ = ["make_report"]


def make_report(external_id: str = "x", params: SamplingParams | None = None) -> RequestReport:
    return RequestReport(external_id=external_id, params=params or SamplingParams(), arrived_s=0.0)
