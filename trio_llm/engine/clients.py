"""Clients: the front ends that an engine serves, and which of them gets what.

Pure. Owned by EngineCore.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from trio_llm.engine.outbox import HEARTBEAT_INTERVAL_S, Outbox
from trio_llm.engine.scheduling.kv_event_log import KVBacklog
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.wire.messages import AttachClient, EngineCoreOutput, FromEngine, KVEvent, SchedulerStats

__all__ = ["OWNER", "Addressed", "Clients"]

OWNER: Final = 0
"""The client that started the engine. It is attached from the beginning, and alone attaches and detaches others."""

Addressed = tuple[int, FromEngine]
"""A message from the engine, and the index of the client that it is for."""

_LOAD_INTERVAL_S: Final = 0.1
"""Age from which the tokens that clients are owed are counted again, which is a walk over all sequences."""


class Clients:
    """An outbox per client. A row goes to the client that sent the request.

    Args:
        scheduler: computes nothing for a client without credit, since this says so.
        epoch, engine_index: which incarnation of which engine this is; put into every message.
        credit_steps: messages that a client may be behind.
        num_blocks: blocks that the prefix cache may have; bounds the KV events that wait.
        now_s: the time, in seconds of a clock that the other methods use, too.
    """

    def __init__(
        self, scheduler: Scheduler, *, epoch: int, engine_index: int, credit_steps: int, num_blocks: int, now_s: float
    ) -> None:
        self._scheduler = scheduler
        self._make_outbox = partial(Outbox, epoch=epoch, engine_index=engine_index, credit_steps=credit_steps)
        self._num_blocks = num_blocks
        self._outboxes: dict[int, Outbox] = {}
        self._only: Outbox | None = None
        """That of client 0 while there is no other: what is done in each step is done without a loop then."""
        self._epochs: dict[int, int] = {}
        """By client, also those that are gone: the newest incarnation."""
        self._owners: dict[str, int] = {}
        """By id of an unfinished request: its client. Those of client 0 are left out, so that an engine with one client
        has nothing to look up."""
        self._owed: Mapping[int, int] = {}
        """By client: tokens that the scheduler still has to compute, at `_owed_s`."""
        self._owed_s = now_s - _LOAD_INTERVAL_S
        self._open(OWNER, now_s)

    def __getitem__(self, client_index: int) -> Outbox:
        return self._outboxes[client_index]

    def __contains__(self, client_index: int) -> bool:
        return client_index in self._outboxes

    # ---------------------------------------------------------------------------- coming and leaving

    def refuse_attach(self, message: AttachClient) -> str | None:
        """Why a client cannot be attached, or None."""
        if message.client_index <= OWNER:
            return f"the index of a client that is attached must be at least 1, not {message.client_index}"
        newest = self._epochs.get(message.client_index, message.epoch)
        if message.epoch < newest:
            return f"client {message.client_index} is attached with epoch {message.epoch}, after epoch {newest}"
        return None

    def attach(self, message: AttachClient, now_s: float) -> None:
        """Serve a client from now on, which is not attached. It gets a message with statistics at once."""
        self._epochs[message.client_index] = message.epoch
        self._open(message.client_index, now_s)
        self._outboxes[message.client_index].answer()

    def detach(self, client_index: int) -> None:
        """Abort all requests of a client and forget what waits for it. No effect if it is not attached."""
        if self._outboxes.pop(client_index, None) is None:
            return
        self._scheduler.abort_all(client_index)
        self._scheduler.suspension.resume(client_index)
        self._owners = {request_id: owner for request_id, owner in self._owners.items() if owner != client_index}
        self._only = self._outboxes[OWNER] if len(self._outboxes) == 1 else None

    def _open(self, client_index: int, now_s: float) -> None:
        outbox = self._outboxes[client_index] = self._make_outbox(kv_events=KVBacklog(self._num_blocks), now_s=now_s)
        self._only = outbox if client_index == OWNER else None

    # -------------------------------------------------------------------------------------- requests

    def owns(self, client_index: int, request_id: str) -> bool:
        """False: the request is another client's, or unknown. Of the unknown ones, all count as those of client 0."""
        return self._owners.get(request_id, OWNER) == client_index

    def own(self, client_index: int, request_id: str) -> None:
        """A request of this client begins."""
        if client_index != OWNER:
            self._owners[request_id] = client_index

    def disown(self, request_id: str) -> None:
        """A request is finished. `add_rows` knows this of the rows that it gets."""
        self._owners.pop(request_id, None)

    # --------------------------------------------------------------------------------------- content

    def add_rows(self, rows: list[EngineCoreOutput]) -> None:
        """Give each client the rows of its requests. They need credit."""
        if not self._owners:
            self._outboxes[OWNER].rows += rows
            return
        for row in rows:
            client_index = self._owners.get(row.request_id, OWNER)
            self._outboxes[client_index].rows.append(row)
            if row.finish_reason is not None and not row.goes_on and client_index != OWNER:
                del self._owners[row.request_id]

    def add_kv_events(self, events: list[KVEvent]) -> None:
        """Give each client all of these."""
        for outbox in self._outboxes.values():
            outbox.kv_events.add(events)

    # ----------------------------------------------------------------------------------------- credit

    @property
    def has_credit(self) -> bool:
        """At least one client is close enough behind for the tokens of another step."""
        if self._only is not None:
            return self._only.has_credit
        return any(outbox.has_credit for outbox in self._outboxes.values())

    def acknowledge(self, client_index: int, step: int) -> None:
        """A client has taken all messages up to this one."""
        outbox = self._outboxes[client_index]
        outbox.acknowledge(step)
        if outbox.has_credit:
            self._scheduler.suspension.resume(client_index)

    # --------------------------------------------------------------------------------------- messages

    def tell_all(self) -> None:
        """Let a message with statistics be due to each client that has credit, also if there is nothing else."""
        for outbox in self._outboxes.values():
            if outbox.has_credit:
                outbox.answer()

    @property
    def is_due(self) -> bool:
        """There is something that `seal` may seal now."""
        if self._only is not None:
            return self._only.is_due
        return any(outbox.is_due for outbox in self._outboxes.values())

    def seal(
        self, now_s: float, stats: SchedulerStats, *, weight_version: str, without_credit: bool = False
    ) -> list[Addressed]:
        """The messages of all clients for which one is due.

        Args:
            without_credit: all rows go out now, also those that should wait for credit.
        """
        return [
            (client_index, self._seal_one(client_index, outbox, now_s, stats, weight_version))
            for client_index, outbox in self._outboxes.items()
            if outbox.is_due or (without_credit and outbox.rows)
        ]

    def _seal_one(
        self, client_index: int, outbox: Outbox, now_s: float, stats: SchedulerStats, weight_version: str
    ) -> FromEngine:
        if self._only is None:
            stats = self._add_load(client_index, now_s, stats)
        message = outbox.seal(now_s, stats, weight_version=weight_version)
        if not outbox.has_credit:
            self._scheduler.suspension.suspend(client_index)
        return message

    def _add_load(self, client_index: int, now_s: float, stats: SchedulerStats) -> SchedulerStats:
        if now_s - self._owed_s >= _LOAD_INTERVAL_S:
            self._owed, self._owed_s = self._scheduler.count_owed_tokens(), now_s
        num_tokens = sum(self._owed.values()) - self._owed.get(client_index, 0)
        return msgspec.structs.replace(stats, num_tokens_of_others=num_tokens) if num_tokens else stats

    # ------------------------------------------------------------------------------------- heartbeats

    @property
    def heartbeat_due_s(self) -> float:
        """When a client will have been sent nothing for a whole interval."""
        if self._only is not None:
            return self._only.quiet_since_s + HEARTBEAT_INTERVAL_S
        return min(outbox.quiet_since_s for outbox in self._outboxes.values()) + HEARTBEAT_INTERVAL_S

    def make_heartbeats(
        self, now_s: float, stats: SchedulerStats, *, weight_version: str, num_executed: int
    ) -> list[Addressed]:
        """What is due to the clients that were sent nothing for a whole interval.

        Beside others, a client is also sent the statistics if they have changed since its last message: it has to know
        of the load and of the end of work that is not its own. Without others, if other numbers of requests run and
        wait: of those that wait and may not begin no row would tell.

        Args:
            num_executed: steps that were computed so far.
        """
        messages: list[Addressed] = []
        for client_index, outbox in self._outboxes.items():
            if outbox.quiet_since_s + HEARTBEAT_INTERVAL_S > now_s:
                continue
            if self._only is None:
                has_news = self._add_load(client_index, now_s, stats) != outbox.stats
            else:
                has_news = _count_requests(stats) != _count_requests(outbox.stats or SchedulerStats())
            if has_news and outbox.has_credit:
                messages.append((client_index, self._seal_one(client_index, outbox, now_s, stats, weight_version)))
            if heartbeat := outbox.make_heartbeat(now_s, num_executed):
                messages.append((client_index, heartbeat))
        return messages


def _count_requests(stats: SchedulerStats) -> tuple[int, int, int]:
    return stats.num_running, stats.num_waiting, stats.num_deferred
