"""RequestState: what a front end knows of one request from its registration to the engine's last row for it.

Pure. Changed by the output processor, as rows come, and by `RequestRegistry`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trio_llm.frontend.requests.output.lifecycle import TRANSITIONS, RequestStatus
from trio_llm.frontend.requests.output.parallel_sampling import Family
from trio_llm.frontend.text.detokenizer import Detokenizer
from trio_llm.frontend.text.stop import StopScanner
from trio_llm.outputs import TokenLogprobs, WeightVersionSpan
from trio_llm.sampling import RequestOutputKind
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, as the engine computes it: with n > 1 there is one for each choice.

    `RequestRegistry.check` asserts what holds between its fields.
    """

    request: EngineCoreRequest
    external_id: str
    detokenizer: Detokenizer
    scanner: StopScanner | None
    """None: no stop strings."""
    kind: RequestOutputKind
    wants_logprobs: bool
    num_prompt_tokens: int
    """For a session: tokens of all its inputs so far."""
    index: int = 0
    """Which choice of the answer this request makes."""
    family: Family | None = None
    """With n > 1: what the requests for the choices of one answer share."""
    status: RequestStatus = RequestStatus.UNSENT
    """Changed by `move` alone."""
    num_tokens: int = 0
    """Generated tokens taken from the engine so far; what the next row's `start` must be."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """These tokens; for a session: those of its newest answer. Four bytes each: every request keeps them, since another
    engine may have to go on after them."""
    num_tokens_when_sent: int | None = None
    """`num_tokens` when the engine got the request; None: the engine does not have it."""
    num_deaths: int = 0
    """Engines that died while they had the request and had given no token of it."""
    is_fast_path: bool = False
    """The reader wants nothing but the tokens and their text, as they come: see `OutputProcessor.process_delta`."""
    num_cached_tokens: int = 0
    queued_s: float | None = None
    """How long the engine let it wait until its first token was planned, by the engine's clock; None: not known yet."""
    prefill_s: float | None = None
    """The same from there to its first token, or to its vector."""
    num_preemptions: int | None = None
    """Times that it lost its KV blocks in the engine; None: the engine has not ended it."""
    num_expired: int = 0
    """How often the engine dropped it because its deadline had passed before anything was computed."""
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """All so far. With DELTA both stay empty: nothing that was given away is kept."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """All so far, one per token of the prompt. None: not asked for, or given away."""
    weight_version: str = "default"
    """The version of the weights that computed its newest row. Changed by `mark_weight_version` alone."""
    version_changes: list[tuple[int, str]] = field(default_factory=list)
    """For each time that it changed since the answer began: `num_tokens` at that time, and the version before."""
    num_earlier_tokens: int = 0
    """For a session: tokens of the answers before the newest one."""

    @property
    def request_id(self) -> str:
        """The internal id."""
        return self.request.request_id

    def move(self, status: RequestStatus) -> None:
        """Change the status along `TRANSITIONS`."""
        assert status in TRANSITIONS[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def mark_weight_version(self, version: str) -> None:
        """Tokens from now on are computed by other weights."""
        self.version_changes.append((self.num_tokens, self.weight_version))
        self.weight_version = version

    def weight_versions(self) -> list[WeightVersionSpan]:
        """Which weights computed which tokens of the newest answer."""
        spans: list[WeightVersionSpan] = []
        start = 0
        for num_tokens, version in (*self.version_changes, (self.num_tokens, self.weight_version)):
            end = num_tokens - self.num_earlier_tokens
            if end > start:
                if spans and spans[-1].version == version:
                    start = spans.pop().start
                spans.append(WeightVersionSpan(version, start, end))
                start = end
        return spans

    def mark_sent(self) -> None:
        """The engine gets the request, or the next input of a session."""
        self.move(RequestStatus.SENT)
        self.num_tokens_when_sent = self.num_tokens

    def mark_expired(self) -> None:
        """The engine dropped the request, uncomputed, and does not have it any more."""
        self.move(RequestStatus.EXPIRED)
        self.num_tokens_when_sent = None
        self.num_expired += 1
