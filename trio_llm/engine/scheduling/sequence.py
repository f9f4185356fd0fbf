"""Sequence: a request inside the engine, its tokens and its KV blocks. SequenceQueue: sequences in order.

Pure. Owned by the scheduler; executors only read a sequence.
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
from trio_llm.wire.work import measure_work

__all__ = ["TRANSITIONS", "Sequence", "SequenceQueue", "SequenceState"]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    """In the waiting line: new, preempted, a session with a new input, or suspended before. Only the last two may hold
    blocks."""
    RUNNING = "running"
    """Has blocks for all its tokens, and is in every step as far as budget and blocks allow."""
    SUSPENDED = "suspended"
    """Its client has no credit: nothing is computed. It holds its blocks until others need them."""
    IDLE = "idle"
    """A session between two inputs: nothing is computed. It holds its blocks until others need them."""
    FINISHED = "finished"
    """Ended, for any reason. Holds no blocks."""


TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.SUSPENDED, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset(
        {SequenceState.WAITING, SequenceState.SUSPENDED, SequenceState.IDLE, SequenceState.FINISHED}
    ),
    SequenceState.SUSPENDED: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.IDLE: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Sequence:
    """One request in the engine.

    Invariants (`check_scheduler` asserts them): 0 <= num_computed_tokens < num_tokens while it runs and nothing of it
    is in flight; len(block_ids) * block_size >= num_computed_tokens; a waiting sequence that never ran holds no blocks.
    """

    request_id: str
    token_ids: list[int]
    """The prompt, then the generated tokens that are known; see `num_pending_tokens`."""
    num_prompt_tokens: int
    """In a session: all tokens before the answer to its newest input."""
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    """Count of arrivals, set by SequenceTable: the order among equal priorities."""
    expires_at: float | None = None
    """Seconds of the engine's clock: a sequence that still waits then, and has not begun, is dropped."""
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    """KV blocks, in the order of positions."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache, or will be when the steps in flight are retired."""
    num_pending_tokens: int = 0
    """1 while a step in flight samples the next token, else 0. The token after it may be planned already."""
    num_in_flight: int = 0
    """Steps in flight that write into this sequence's blocks."""
    num_preemptions: int = 0
    """Times that it lost its blocks and had to begin again."""
    finish_reason: FinishReason | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    """Lists of token ids that must not be generated in succession; none is empty."""
    next_prompt_logprob: int = 1
    """Position of the first prompt token whose log-probability was not sent yet, if they were asked for; token 0 has
    none. Kept when the sequence is preempted: a log-probability is computed and sent once."""
    is_resumable: bool = False
    """A session: at the end of an answer it becomes idle, and its next input continues it."""
    num_earlier_tokens: int = 0
    """Tokens generated in answers to earlier inputs of a session."""
    cache_root: BlockHash = NO_SALT
    """Root of the chain of its block hashes: sequences with different roots share no blocks."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids`, as far as they were needed."""
    num_published_blocks: int = 0
    """Blocks of `block_ids`, from the first, that were published: others can find them, or equal ones."""
    num_cached_tokens: int | None = None
    """Tokens found in the cache when it was first admitted; None before."""
    pooling: PoolingParams | None = None
    """Set: no token is sampled, and the sequence is finished, with one vector, when its last token is computed."""
    arrived_s: float = 0.0
    """When the engine got it; seconds of the engine's clock."""
    scheduled_s: float | None = None
    """When it was first admitted, on the same clock; None before."""
    has_begun: bool = False
    """Its answer has begun, here or in an earlier incarnation: a pause that makes new sequences wait lets it go on."""
    client_index: int = 0
    """The client that asked for it."""

    @property
    def order(self) -> tuple[int, int]:
        """The sequence with the smaller value is served first. Two sequences of a scheduler never have equal values."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens that are known when the steps in flight are retired."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V are not in the cache yet; the next token needs all of them."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, also in an earlier incarnation; in a session, for its newest input."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_owed_tokens(self) -> int:
        """What is still to be done for it, in prompt tokens: see `measure_work`."""
        if self.state is SequenceState.IDLE:
            return 0
        num_prompt_tokens = max(0, self.num_prompt_tokens - self.num_computed_tokens)
        if self.pooling is not None:
            return measure_work(num_prompt_tokens, 0)
        assert self.params.max_tokens is not None
        return measure_work(num_prompt_tokens, self.params.max_tokens - self.num_output_tokens)

    @property
    def next_start(self) -> int:
        """Index of the next token among all generated for the request."""
        return self.num_earlier_tokens + self.num_output_tokens

    def begin(self, now_s: float) -> None:
        """It is admitted. `now_s` is on the clock of `arrived_s`."""
        self.has_begun = True
        if self.scheduled_s is None:
            self.scheduled_s = now_s

    @property
    def queued_s(self) -> float | None:
        """Seconds from its arrival until it was first admitted; None before."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrived_s

    def move_to(self, state: SequenceState) -> None:
        """Change the state along `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state


_order = attrgetter("order")


class SequenceQueue:
    """Sequences by priority, then arrival. A change costs a bisection and a shift."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile; iterate over a copy to change it."""
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        """The sequence to serve last. The queue must not be empty."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index : index + 1] == [sequence], f"{sequence.request_id} is not in this queue"
        del self._sequences[index]
