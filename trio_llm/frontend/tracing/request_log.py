"""RequestLog: one line in the log for each request that is over, and if that is asked for, one when it arrives.

An observer of requests. Its logger has a name of its own, so that a program can turn these lines off or send them
elsewhere: `logging.getLogger("trio_llm.requests")`.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from trio_llm.frontend.tracing.report import RequestReport
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestLog"]

logger: Final = logging.getLogger("trio_llm.requests")


class RequestLog:
    """Implements `RequestObserver`.

    Args:
        logs_arrivals: write a line with the parameters when a request is admitted, too; at level DEBUG also its prompt.
        max_len: characters of text, and ids of tokens, that a line shows of a prompt. None: all.
    """

    def __init__(self, *, logs_arrivals: bool, max_len: int | None) -> None:
        self._logs_arrivals = logs_arrivals
        self._max_len = max_len

    def on_arrival(self, report: RequestReport, request: EngineCoreRequest, text: str | None) -> None:
        """Write what was asked for."""
        if not self._logs_arrivals or not logger.isEnabledFor(logging.INFO):
            return
        shown_id = _show_id(report.external_id)
        logger.info(
            "Received request %s: %d prompt tokens, priority %d, %s",
            shown_id,
            len(request.prompt_token_ids),
            request.priority,
            _describe(report.params),
        )
        if logger.isEnabledFor(logging.DEBUG):
            shown_text = None if text is None else text[: self._max_len]
            token_ids = request.prompt_token_ids[: self._max_len]
            logger.debug("Request %s: prompt %r, token ids %s", shown_id, shown_text, token_ids)

    def on_end(self, report: RequestReport) -> None:
        """Write how it went."""
        if not logger.isEnabledFor(logging.INFO):
            return
        first_token_s = report.time_to_first_token_s
        logger.info(
            "%s request %s: %s, %d prompt tokens (%d cached), %d generated tokens, %s, %.3f s in all",
            "Failed" if report.has_failed else "Aborted" if report.was_aborted else "Finished",
            _show_id(report.external_id),
            # The message of an error may quote the prompt.
            type(report.error).__name__ if report.error is not None else ", ".join(report.finish_reasons),
            report.num_prompt_tokens,
            report.num_cached_tokens,
            report.num_output_tokens,
            "no token" if first_token_s is None else f"first token after {first_token_s:.3f} s",
            report.e2e_latency_s,
        )


def _show_id(external_id: str) -> str:
    """The caller's id, which must not break the line."""
    return external_id if external_id.isprintable() else ascii(external_id)


def _describe(params: SamplingParams | PoolingParams) -> str:
    """The parameters that differ from their defaults."""
    fields = msgspec.structs.fields(type(params))
    shown = [f"{one.name}={value!r}" for one in fields if (value := getattr(params, one.name)) != _default_of(one)]
    return f"{type(params).__name__}({', '.join(shown)})"


def _default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
