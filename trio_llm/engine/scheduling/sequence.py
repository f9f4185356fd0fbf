"""Sequence: a request inside the engine, its tokens and its KV blocks.

Pure. Owned by the scheduler; executors read it and write nothing in it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from trio_llm.outputs import FinishReason
from trio_llm.sampling import SamplingParams

__all__ = ["TRANSITIONS", "Sequence", "SequenceState"]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    """In the queue: new, or preempted and to be computed again. Holds no blocks."""
    RUNNING = "running"
    """Has blocks; is in every step, as far as budget and blocks go."""
    FINISHED = "finished"
    """Over, for whatever reason. Holds no blocks."""


TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request in the engine.

    Invariants (`Scheduler.check` asserts them): 0 <= num_computed_tokens < len(token_ids) while it runs;
    len(block_ids) * block_size >= num_computed_tokens; blocks only while RUNNING.
    """

    request_id: str
    token_ids: list[int]
    """Prompt, then what was generated."""
    num_prompt_tokens: int
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    """Count of arrivals at the scheduler: the order among equals."""
    expires_at: float | None = None
    """Engine's clock, seconds: dropped if it still waits then."""
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    """KV blocks, in the order of positions."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache."""
    finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of an earlier incarnation included."""
        return len(self.token_ids) - self.num_prompt_tokens

    def move_to(self, state: SequenceState) -> None:
        """Change the state along `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state
