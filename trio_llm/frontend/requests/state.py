"""RequestState: what a front end knows of one request between its registration and the engine's last row for it.

Pure. Changed by the output processor and by `RequestRegistry`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trio_llm.frontend.requests.parallel_sampling import Family
from trio_llm.frontend.text.detokenizer import Detokenizer
from trio_llm.frontend.text.stop import StopScanner
from trio_llm.outputs import TokenLogprobs
from trio_llm.sampling import RequestOutputKind
from trio_llm.wire.messages import EngineCoreRequest

__all__ = ["RequestState"]


@dataclass(slots=True, eq=False)
class RequestState:
    """One request between its registration and the engine's last row for it."""

    request: EngineCoreRequest
    external_id: str
    detokenizer: Detokenizer
    scanner: StopScanner | None
    """None: no stop strings."""
    kind: RequestOutputKind
    wants_logprobs: bool
    num_prompt_tokens: int
    """Of a session: tokens of all its inputs so far."""
    index: int = 0
    """Of the choice that this request makes."""
    family: Family | None = None
    """With n > 1: what it has in common with the requests that make the other choices."""
    num_tokens: int = 0
    """Generated tokens taken from the engine so far; what the next row's `start` must be."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """These tokens; of a session: those of its newest answer. Four bytes each: every request keeps them, since another
    engine may have to go on after them."""
    num_tokens_when_sent: int | None = None
    """`num_tokens` when the engine got the request; None: the engine does not have it."""
    num_deaths: int = 0
    """Of engines that had the request and gave no token of it."""
    is_fast_path: bool = False
    """Only its tokens and their text are wanted, as they come: see `OutputProcessor.process_delta`."""
    is_idle: bool = False
    """A session that waits for its next input: the engine owes it nothing."""
    num_cached_tokens: int = 0
    num_expired: int = 0
    """How often the engine has dropped it, its deadline passed, before anything was computed."""
    is_dropped: bool = False
    """The engine has done so and does not have it now."""
    is_tombstone: bool = False
    """Nobody reads any more; rows on their way are dropped until the engine's last one comes."""
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """All so far; `text` and `logprobs` not for DELTA, which keeps nothing it has given away."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """All so far, one a token of the prompt. None: not asked for, or given away."""
    weight_version: str = "default"
    """Of the engine when it was heard of last."""
