"""Outbox: what the engine has for the front end, sealed into numbered messages, and the credit to send more.

Pure. Owned by EngineCore.
"""

from __future__ import annotations

from trio_llm.wire.messages import EngineCoreOutput, EngineCoreOutputs, KVEvent, SchedulerStats, UtilityResult

__all__ = ["Outbox"]


class Outbox:
    """Rows and results go in, messages come out, each with what there was when it was sealed.

    Args:
        epoch, engine_index: which incarnation of which engine this is; put into every message.
        credit_steps: messages that the front end may be behind.
    """

    def __init__(self, *, epoch: int, engine_index: int, credit_steps: int) -> None:
        self.epoch = epoch
        self.engine_index = engine_index
        self.num_sent = 0
        """Messages sealed so far."""
        self.rows: list[EngineCoreOutput] = []
        self.utility_results: list[UtilityResult] = []
        self._credit_steps = credit_steps
        self._num_acknowledged = 0

    @property
    def has_content(self) -> bool:
        """There is something to seal."""
        return bool(self.rows or self.utility_results)

    @property
    def has_credit(self) -> bool:
        """The front end is close enough behind for the tokens of another step."""
        return self.num_sent - self._num_acknowledged < self._credit_steps

    def acknowledge(self, step: int) -> None:
        """The front end has taken all messages up to this one. Messages that were never sent give no credit."""
        self._num_acknowledged = min(max(self._num_acknowledged, step), self.num_sent)

    def seal(
        self, now_s: float, stats: SchedulerStats, *, kv_events: list[KVEvent], weight_version: str
    ) -> EngineCoreOutputs:
        """Put all rows and results into one message, in the order in which they came."""
        rows, self.rows = self.rows, []
        results, self.utility_results = self.utility_results, []
        self.num_sent += 1
        return EngineCoreOutputs(
            epoch=self.epoch,
            engine_index=self.engine_index,
            step=self.num_sent,
            timestamp=now_s,
            outputs=rows,
            stats=stats,
            utility_results=results,
            kv_events=kv_events,
            weight_version=weight_version,
        )
