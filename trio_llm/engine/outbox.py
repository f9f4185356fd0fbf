"""Outbox: what the engine has for one of its clients, sealed into numbered messages, and the credit to send more.

Pure. Owned by Clients, which has one per client.
"""

from __future__ import annotations

from typing import Final

from trio_llm.engine.scheduling.kv_event_log import KVBacklog
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreOutputs, Heartbeat, SchedulerStats, UtilityResult

__all__ = ["HEARTBEAT_INTERVAL_S", "Outbox"]

HEARTBEAT_INTERVAL_S: Final = 1.0
_MAX_HEARTBEATS: Final = 60
"""Heartbeats to a client without credit until it acknowledges something."""


class Outbox:
    """Rows, results and KV events go in, messages come out, each with what there was when it was sealed.

    Answers to the client's own messages need no credit. All else waits here until the client has some, or until an
    answer goes out, which takes along what waits, so that the order is kept. So a client that is stopped has at most
    `credit_steps` messages on their way, beside the answers to what it sent before.

    Args:
        epoch, engine_index: which incarnation of which engine this is; put into every message.
        credit_steps: messages that the client may be behind.
        kv_events: what waits for the client of the changes of the prefix cache.
        now_s: when the client was attached, on the clock of `seal`.
    """

    def __init__(self, *, epoch: int, engine_index: int, credit_steps: int, kv_events: KVBacklog, now_s: float) -> None:
        self.epoch = epoch
        self.engine_index = engine_index
        self.num_sent = 0
        """Messages sealed so far."""
        self.quiet_since_s = now_s
        """When the client was sent rows last, or a heartbeat was due to it."""
        self.rows: list[EngineCoreOutput] = []
        """Rows that wait. The owner appends those that need credit."""
        self.kv_events = kv_events
        self.stats: SchedulerStats | None = None
        """Those of the newest message."""
        self._utility_results: list[UtilityResult] = []
        self._has_answers = False
        self._credit_steps = credit_steps
        self._num_acknowledged = 0
        self._num_heartbeats = 0
        """To the client without credit, since it last acknowledged something."""

    @property
    def has_credit(self) -> bool:
        """The client is close enough behind for the tokens of another step."""
        return self.num_sent - self._num_acknowledged < self._credit_steps

    @property
    def is_due(self) -> bool:
        """There is something that may be sealed now."""
        return self._has_answers or (bool(self.rows or self.kv_events) and self.has_credit)

    def answer(self, row: EngineCoreOutput | UtilityResult | None = None) -> None:
        """Add an answer to a message of the client; without one, a message is due that has statistics alone."""
        self._has_answers = True
        if isinstance(row, UtilityResult):
            self._utility_results.append(row)
        elif row is not None:
            self.rows.append(row)

    def acknowledge(self, step: int) -> None:
        """The client has taken all messages up to this one. Messages that were never sent give no credit."""
        self._num_acknowledged = min(max(self._num_acknowledged, step), self.num_sent)
        self._num_heartbeats = 0

    def seal(self, now_s: float, stats: SchedulerStats, *, weight_version: str) -> EngineCoreOutputs:
        """Put all that waits into one message, in the order in which it came."""
        rows, self.rows = self.rows, []
        results, self._utility_results = self._utility_results, []
        self._has_answers = False
        self.num_sent += 1
        if rows:  # only heartbeats say that steps are computed of which no rows come
            self.quiet_since_s = now_s
        self.stats = stats
        return EngineCoreOutputs(
            epoch=self.epoch,
            engine_index=self.engine_index,
            step=self.num_sent,
            timestamp=now_s,
            outputs=rows,
            stats=stats,
            utility_results=results,
            kv_events=self.kv_events.take() if self.kv_events else [],
            weight_version=weight_version,
        )

    def make_heartbeat(self, now_s: float, num_executed: int) -> Heartbeat | None:
        """The message that shows that the loop turns. None if the client takes nothing, and has got enough of them."""
        self.quiet_since_s = now_s
        self._num_heartbeats = 0 if self.has_credit else self._num_heartbeats + 1
        if self._num_heartbeats > _MAX_HEARTBEATS:
            return None
        return Heartbeat(self.epoch, self.num_sent, num_executed, self.engine_index)
