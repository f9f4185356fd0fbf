"""Sequence: a request inside the engine, its tokens and its KV blocks. SequenceQueue: sequences in order.

Pure. Owned by the scheduler; executors read a sequence and write nothing in it.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from trio_llm.engine.scheduling.block_hash import NO_SALT, BlockHash
from trio_llm.outputs import FinishReason
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams

__all__ = ["TRANSITIONS", "Sequence", "SequenceQueue", "SequenceState"]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    """In the queue: new, preempted and to be computed again, or a session with a new input. Only the last may hold
    blocks, those that it kept."""
    RUNNING = "running"
    """Has blocks; is in every step, as far as budget and blocks go."""
    IDLE = "idle"
    """A session between two inputs: nothing is computed. May hold blocks, until others need them."""
    FINISHED = "finished"
    """Over, for whatever reason. Holds no blocks."""


TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.IDLE, SequenceState.FINISHED}),
    SequenceState.IDLE: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Sequence:
    """One request in the engine.

    Invariants (`check_scheduler` asserts them): 0 <= num_computed_tokens < num_tokens while it runs and nothing of it
    is in flight; len(block_ids) * block_size >= num_computed_tokens; blocks only while RUNNING, but for sessions, which
    keep theirs.
    """

    request_id: str
    token_ids: list[int]
    """Prompt, then what was generated and is known: see `num_pending_tokens`."""
    num_prompt_tokens: int
    """Of a session: all before the answer to its newest input."""
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    """Count of arrivals at the scheduler, which sets it: the order among equals."""
    expires_at: float | None = None
    """Engine's clock, seconds: dropped if it still waits then."""
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    """KV blocks, in the order of positions."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache, or will be when the steps in flight are through."""
    num_pending_tokens: int = 0
    """1 while a step in flight samples the next token, else 0. The token after it may be planned already."""
    num_in_flight: int = 0
    """Steps in flight that write into this sequence's blocks."""
    num_preemptions: int = 0
    """Times it lost its blocks and had to begin again."""
    finish_reason: FinishReason | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    """Token ids that must not come to stand one after the other; none of these lists is empty."""
    next_prompt_logprob: int = 1
    """Prompt tokens whose log-probabilities are out, if they were asked for; the first token has none. Kept when the
    sequence is preempted: what is out is not computed again."""
    is_resumable: bool = False
    """A session: it rests at the end of an answer, and goes on with the next input."""
    num_earlier_tokens: int = 0
    """Generated in answers to earlier inputs of a session."""
    cache_root: BlockHash = NO_SALT
    """What the chain of its blocks' hashes begins with: sequences with different ones share no blocks."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of `token_ids`, as far as they were needed."""
    num_published_blocks: int = 0
    """Of `block_ids`, from the first: those that others can find, or could if they did not hold the same elsewhere."""
    num_cached_tokens: int | None = None
    """Tokens found in the cache when it was first admitted; None before."""
    pooling: PoolingParams | None = None
    """Set: nothing is sampled. The sequence is over, with one vector, when its last token is computed."""
    is_under_way: bool = False
    """Its answer has begun, here or in an earlier incarnation: it goes on when only new ones are held up."""

    @property
    def order(self) -> tuple[int, int]:
        """Whom to serve first: the smaller one. Never equal for two sequences of a scheduler."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens that are there when the steps in flight are through."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V are not in the cache yet; the next token needs all of them."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of an earlier incarnation included; of a session: for its newest input."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_start(self) -> int:
        """Index of the next token among all generated for the request."""
        return self.num_earlier_tokens + self.num_output_tokens

    def move_to(self, state: SequenceState) -> None:
        """Change the state along `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state


_order = attrgetter("order")


class SequenceQueue:
    """Sequences by priority, then arrival. Looking at the last one is O(1), a change costs a bisection and a shift."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile; iterate over a copy to change it."""
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        """The one to serve last. The queue must not be empty."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index : index + 1] == [sequence], f"{sequence.request_id} is not in this queue"
        del self._sequences[index]
