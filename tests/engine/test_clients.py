"""An engine with several clients: each gets what is its own, and one that takes nothing holds nobody up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.scheduling.kv_replica import KVReplica
from tests.engine.test_core import PARAMS, a_core, a_request
from tests.engine.test_core import run as run_alone
from tests.support.many_clients import ClientsOfACore
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import (
    Abort,
    Ack,
    AllBlocksCleared,
    AttachClient,
    Continue,
    DetachClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    UtilityCall,
)
from trio_llm.wire.work import measure_work

EPOCH = 3
"""That of `a_core`."""


def clients_of(*indexes: int, **settings: Any) -> ClientsOfACore:
    """An engine with client 0 and those of `indexes`, which know that it is ready."""
    clients = ClientsOfACore(a_core(**settings), engine_epoch=EPOCH)
    for index in indexes:
        clients.attach(index)
    clients.run()
    return clients


def answer_alone(request: EngineCoreRequest) -> list[int]:
    return [token_id for row in run_alone(a_core(), request) for token_id in row.new_token_ids]


# ------------------------------------------------------------------------------- coming and leaving


def test_an_attached_client_gets_ready_then_statistics_and_counts_messages_from_one() -> None:
    clients = clients_of(1)

    ready, statistics = clients[1].messages

    assert isinstance(ready, Ready)
    assert ready.model == clients.core.ready().model
    assert isinstance(statistics, EngineCoreOutputs)
    assert (statistics.step, statistics.outputs) == (1, [])
    assert clients[0].messages == []


def test_each_client_gets_the_rows_of_its_requests_alone() -> None:
    clients = clients_of(1, 2)
    requests = {index: a_request(f"r{index}", [index + 1] * 5, max_tokens=4 + index) for index in range(3)}
    for index, request in requests.items():
        clients.send(index, request)

    clients.run()

    for index, request in requests.items():
        assert {row.request_id for row in clients[index].rows} == {request.request_id}
        assert clients[index].tokens_of(request.request_id) == answer_alone(request)


def test_a_result_goes_to_the_client_that_called() -> None:
    clients = clients_of(1, 2)
    clients.send(1, UtilityCall(7, "ping"))
    clients.send(2, UtilityCall(7, "no such method"))

    clients.turn()

    assert [(result.call_id, result.value) for result in clients[1].results] == [(7, 1)], "messages to this client"
    assert [(result.call_id, bool(result.error)) for result in clients[2].results] == [(7, True)]
    assert clients[0].results == []


def test_a_pause_that_aborts_gives_each_client_the_ends_of_its_requests() -> None:
    clients = clients_of(1)
    clients.send(0, a_request("zero", max_tokens=99))
    clients.send(1, a_request("one", max_tokens=99), a_request("session", resumable=True, max_tokens=1))
    clients.turn()
    clients.send(0, UtilityCall(1, "pause", ["abort", False]))

    clients.turn()

    assert [(row.request_id, row.finish_reason) for row in clients[0].rows[-1:]] == [("zero", "abort")]
    ends = {row.request_id: row.finish_reason for row in clients[1].rows if not row.goes_on and row.finish_reason}
    assert ends == {"one": "abort", "session": "abort"}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_detaching_aborts_what_the_client_has_and_disturbs_nobody(run_ahead: int) -> None:
    clients = clients_of(1, 2, run_ahead=run_ahead)
    kept = a_request("kept", [5] * 20, max_tokens=12)
    clients.send(1, a_request("runs", [1] * 20, max_tokens=99), a_request("session", resumable=True, max_tokens=1))
    clients.send(2, kept)
    for _ in range(4):
        clients.turn()
    clients.send(1, a_request("waits", max_tokens=99))

    gone = clients.detach(1)
    before = len(gone.messages)
    clients.run()

    assert len(gone.messages) == before
    assert clients[2].tokens_of("kept") == answer_alone(kept)
    assert clients.core.stats.num_free_blocks == clients.core.stats.num_blocks
    assert clients.core.stats.num_waiting == clients.core.stats.num_running == 0


def test_what_was_ready_to_be_sent_to_a_client_goes_nowhere_once_it_is_detached() -> None:
    clients = clients_of(1)
    clients.send(1, a_request("r", []), UtilityCall(1, "ping"), UtilityCall(2, "wait_paused"), Abort(["x"]))

    clients.detach(1)

    assert clients.turn() == {}


def test_another_incarnation_begins_with_nothing_of_the_one_before() -> None:
    clients = clients_of(1)
    clients.send(1, a_request("old", max_tokens=99, output_token_ids=[1]))
    clients.send(1, UtilityCall(1, "pause", ["wait", False]), UtilityCall(2, "wait_paused"))
    clients.turn()
    assert [result.call_id for result in clients[1].results] == [1]

    clients.attach(1)
    clients.send(0, UtilityCall(3, "resume"))
    clients.send(1, a_request("old", max_tokens=2))
    clients.run()

    assert isinstance(clients[1].messages[0], Ready)
    assert [row.start for row in clients[1].rows] == [0, 1]
    assert clients[1].results == []


def test_another_incarnation_has_credit_although_the_one_before_had_none() -> None:
    clients = clients_of(1, 2, credit_steps=3)
    clients.send(1, a_request("old", max_tokens=50))
    clients.send(2, a_request("other", max_tokens=50))
    clients.run(acknowledging=(0, 2))

    clients.attach(1)
    clients.send(1, a_request("new", max_tokens=50))
    clients.run(acknowledging=(0, 2))

    assert [row.start for row in clients[1].rows] == [0, 1], "beside the first message, which has statistics"


@pytest.mark.parametrize("message", [AttachClient(2, 1, "a", "b"), DetachClient(0), DetachClient(1)])
def test_only_client_0_attaches_and_detaches(message: AttachClient | DetachClient) -> None:
    clients = clients_of(1)

    problem = clients.core.handle(message, 1)

    assert problem is not None
    assert "client 1" in problem
    assert clients.core.take_link_changes() == []
    clients.send(1, a_request())
    clients.run()
    assert len(clients[1].rows) == 3


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (AttachClient(0, 1, "a", "b"), "at least 1"),
        (AttachClient(-1, 1, "a", "b"), "at least 1"),
        (AttachClient(1, 0, "a", "b"), "epoch 0"),
        (DetachClient(0), "cannot be detached"),
    ],
)
def test_what_client_0_may_not_ask_for_changes_nothing(message: AttachClient | DetachClient, why: str) -> None:
    clients = clients_of(1)

    problem = clients.core.handle(message, 0)

    assert problem is not None
    assert why in problem
    clients.send(1, a_request())
    clients.run()
    assert len(clients[1].rows) == 3


def test_a_message_of_a_client_that_is_not_attached_is_dropped() -> None:
    clients = clients_of()

    assert clients.core.handle(a_request(), 5) == "client 5 is not attached"
    assert not clients.core.is_busy


def test_a_client_can_neither_abort_nor_continue_nor_take_the_id_of_what_is_anothers() -> None:
    clients = clients_of(1, 2)
    clients.send(1, a_request("r", resumable=True, max_tokens=3))
    clients.turn()
    clients.send(2, Abort(["r"]), a_request("r", max_tokens=9), Continue("r", [1], PARAMS))
    clients.send(0, Abort(["r"]))

    clients.run()

    assert [row.finish_reason for row in clients[0].rows] == ["abort"]
    assert [row.finish_reason for row in clients[2].rows] == ["abort", "error"]
    assert [(row.start, row.goes_on) for row in clients[1].rows] == [(0, False), (1, False), (2, True)]
    clients.send(1, Continue("r", [5], PARAMS))
    clients.run()
    assert [row.start for row in clients[1].rows] == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------- credit


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_client_that_takes_nothing_gets_no_more_than_its_credit_and_the_others_go_on(run_ahead: int) -> None:
    clients = clients_of(1, 2, credit_steps=5, run_ahead=run_ahead)
    stopped = a_request("stopped", [1] * 20, max_tokens=40)
    goes_on = a_request("goes on", [2] * 20, max_tokens=40)
    late = a_request("late", [3] * 20, max_tokens=5)
    clients.send(1, stopped)
    clients.send(2, goes_on)

    clients.run(acknowledging=(0, 2))

    assert clients[2].tokens_of("goes on") == answer_alone(goes_on)
    num_messages = len(clients[1].outputs)
    assert num_messages == 1 + 5, "the first was acknowledged"
    clients.send(2, late)
    clients.run(acknowledging=(0, 2))
    assert clients[2].tokens_of("late") == answer_alone(late)
    assert len(clients[1].outputs) == num_messages

    clients.run()

    assert clients[1].tokens_of("stopped") == answer_alone(stopped)
    assert clients.core.stats.num_preempted == 0, "its blocks were kept"


def test_sequences_of_a_client_without_credit_take_no_place_in_a_step() -> None:
    clients = clients_of(1, 2, credit_steps=2)
    clients.send(1, *(a_request(f"s{i}", [i], max_tokens=50) for i in range(4)))  # all places
    clients.run(acknowledging=(0, 2))
    clients.send(2, *(a_request(f"r{i}", [i], max_tokens=5) for i in range(4)))

    clients.run(acknowledging=(0, 2))

    assert len(clients[2].rows) == 4 * 5
    assert (clients.core.stats.num_running, clients.core.stats.num_waiting) == (0, 4)


def test_others_take_the_blocks_of_a_client_without_credit_before_they_preempt_each_other() -> None:
    clients = clients_of(1, 2, credit_steps=2)
    stopped = a_request("stopped", [1] * 300, max_tokens=60)  # 10 of 16 blocks
    big = a_request("big", [2] * 300, max_tokens=60)
    clients.send(1, stopped)
    clients.run(acknowledging=(0, 2))
    clients.send(2, big)

    clients.run(acknowledging=(0, 2))

    assert clients[2].tokens_of("big") == answer_alone(big)
    clients.run()
    assert clients[1].tokens_of("stopped") == answer_alone(stopped)
    assert clients.core.stats.num_preempted == 1, "the one that was stopped"


def test_a_request_that_comes_without_credit_waits_for_it_and_does_not_expire_meanwhile() -> None:
    now_s = 0.0
    clients = clients_of(1, credit_steps=1, clock=lambda: now_s)
    clients.send(1, a_request("first", max_tokens=5))
    clients.turn()
    clients.send(1, a_request("second", deadline_s=5.0), a_request("patient", max_tokens=2))
    clients.run(acknowledging=(0,))
    now_s = 10.0
    clients.run(acknowledging=(0,))
    assert clients[1].rows_of("second") == clients[1].rows_of("patient") == []

    clients.run()

    (expired,) = clients[1].rows_of("second")
    assert expired.is_expired
    assert len(clients[1].rows_of("patient")) == 2


def test_a_prompt_that_was_begun_when_its_client_lost_its_credit_does_not_expire() -> None:
    now_s = 0.0
    clients = clients_of(1, credit_steps=1, clock=lambda: now_s)
    clients.send(1, a_request("fills", max_tokens=1), a_request("begun", [1] * 40, deadline_s=5.0))
    clients.run(acknowledging=(0,))
    now_s = 10.0

    clients.run()

    assert len(clients[1].rows_of("begun")) == 3


def test_the_next_input_of_a_session_waits_for_credit() -> None:
    clients = clients_of(1, 2, credit_steps=3)
    clients.send(1, a_request("session", resumable=True, max_tokens=3))
    clients.send(2, a_request("other", max_tokens=60))
    clients.run(acknowledging=(0, 2))
    clients.send(1, Continue("session", [5], PARAMS))
    clients.run(acknowledging=(0, 2))
    assert [row.start for row in clients[1].rows] == [0, 1, 2]

    clients.run()

    assert [row.start for row in clients[1].rows] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_aborts_without_credit_are_confirmed_at_once_behind_the_tokens_that_wait(run_ahead: int) -> None:
    clients = clients_of(1, 2, credit_steps=3, run_ahead=run_ahead)
    clients.send(1, a_request("r", max_tokens=50))
    clients.send(2, a_request("other", max_tokens=50))
    clients.run(acknowledging=(0, 2))
    clients.send(1, Abort(["r"]))

    clients.turn()

    rows = clients[1].rows_of("r")
    assert rows[-1].finish_reason == "abort"
    assert [row.start for row in rows] == list(range(len(rows))), "a gap"
    assert clients.core.stats.num_free_blocks == clients.core.stats.num_blocks


def test_tokens_that_wait_for_credit_carry_the_version_of_the_weights_that_made_them(tmp_path: Any) -> None:
    clients = clients_of(1, credit_steps=1, run_ahead=1)
    clients.send(1, a_request("r", max_tokens=8))
    clients.send(0, a_request("zero", max_tokens=8))
    for _ in range(3):
        clients.turn()
    clients.send(0, UtilityCall(1, "update_weights", [str(tmp_path), "new"]))
    clients.run()

    versions = {row.start: message.weight_version for message in clients[1].outputs for row in message.outputs}

    alone = answer_alone(a_request("r", max_tokens=8))
    tokens = clients[1].tokens_of("r")
    assert versions == {start: "default" if start < 2 else "new" for start in range(8)}
    assert tokens[:2] == alone[:2]
    assert tokens[2:] != alone[2:]


def test_pausing_until_the_end_waits_for_sequences_of_a_client_without_credit() -> None:
    clients = clients_of(1, credit_steps=2)
    clients.send(1, a_request("r", max_tokens=9))
    clients.run(acknowledging=(0,))
    clients.send(0, UtilityCall(1, "pause", ["wait", False]), UtilityCall(2, "wait_paused"))
    clients.run(acknowledging=(0,))
    assert [result.call_id for result in clients[0].results] == [1]

    clients.run()

    assert [(result.call_id, result.value) for result in clients[0].results[1:]] == [(2, True)]
    assert len(clients[1].rows_of("r")) == 9


# --------------------------------------------------------------------------------------- KV events


def test_every_client_gets_all_kv_events() -> None:
    clients = clients_of(1, kv_events=True)
    clients.send(1, a_request(prompt=[1] * 70, max_tokens=1))

    clients.run()

    assert clients[0].kv_events == clients[1].kv_events
    assert len(clients[0].kv_events) == 2


@pytest.mark.parametrize("resets", [False, True])
def test_kv_events_of_a_stopped_client_are_bounded_and_lead_to_the_same_cache(resets: bool) -> None:
    clients = clients_of(1, kv_events=True, credit_steps=1)
    replica = KVReplica()
    clients.send(1, a_request("first", [9] * 70, max_tokens=1))
    clients.run(acknowledging=(0,))
    num_seen = len(clients[1].kv_events)
    backlog = clients.core._clients[1].kv_events
    for number in range(60):  # of 16 blocks; each request leaves 4
        clients.send(0, a_request(f"r{number}", [number % 7, number] * 65, max_tokens=1))
        clients.run(acknowledging=(0,))
        if resets and number == 40:
            clients.send(0, UtilityCall(1, "reset_prefix_cache"))
        assert len(backlog._events) <= 4 * 16

    clients.run()

    assert num_seen < len(clients[1].kv_events)
    # Blocks that came and went are left out, and a parent may be one of these.
    replica.ever.update(event_hash for event in clients[1].kv_events for event_hash in _parents(event))
    for event in clients[1].kv_events:
        replica.apply(event)
    assert replica.known == set(clients.core._scheduler._blocks._pool._by_hash)
    assert (AllBlocksCleared() in clients[1].kv_events) == resets


def _parents(event: Any) -> list[bytes]:
    parent = getattr(event, "parent_block_hash", None)
    return [] if parent is None else [parent]


# ------------------------------------------------------------------------------- load and heartbeats


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_engine_with_one_client_says_nothing_of_others() -> None:
    clients = clients_of()
    clients.send(0, a_request(max_tokens=9))

    clients.run()

    assert {message.stats.num_tokens_of_others for message in clients[0].outputs if message.stats} == {0}


def test_each_message_says_how_many_tokens_the_engine_owes_to_others() -> None:
    time = Time()
    clients = clients_of(1, 2, clock=time)
    time.now_s += 0.5
    clients.send(1, a_request("one", [1] * 10, max_tokens=100))
    clients.send(2, a_request("two", [1] * 20, max_tokens=1000), a_request("session", resumable=True, max_tokens=1))
    clients.send(0, UtilityCall(1, "ping"))
    for _ in range(2):
        clients.turn()

    def load(index: int) -> int:
        stats = clients[index].outputs[-1].stats
        assert stats is not None
        return stats.num_tokens_of_others

    first = clients[0].outputs[-1].stats
    assert first is not None
    expected = measure_work(10, 100) + measure_work(20, 1000) + measure_work(2, 1)
    assert first.num_tokens_of_others == expected, "before the first step"
    time.now_s += 0.5
    clients.turn()
    owed_1, owed_2 = (clients.core._scheduler.count_owed_tokens()[index] for index in (1, 2))
    assert owed_1 == measure_work(0, 100 - len(clients[1].rows))
    assert owed_2 == measure_work(0, 1000 - len(clients[2].rows_of("two")))
    assert (load(1), load(2)) == (owed_2, owed_1), "what a session that waits for input may ask for is not owed"


def test_a_client_hears_of_the_load_and_that_it_is_gone_although_it_asks_for_nothing() -> None:
    time = Time()
    clients = clients_of(1, 2, clock=time)
    clients.send(1, a_request("r", max_tokens=500))
    for _ in range(500):
        time.now_s += 0.01
        clients.turn()
        clients.acknowledge(1)
    for _ in range(3):
        time.now_s += 1.0
        clients.turn()

    loads = [message.stats.num_tokens_of_others for message in clients[2].outputs if message.stats]
    assert loads[0] == 0
    assert 4 <= len(loads) <= 7, "once a second"
    assert loads[1:-1] == sorted(loads[1:-1], reverse=True)
    assert loads[1] > 300
    assert loads[-1] == 0
    last = clients[2].outputs[-1].stats
    assert last is not None
    assert last.num_running == 0


def count_heartbeats(clients: ClientsOfACore, time: Time, seconds: int, then: Callable[[], None]) -> list[int]:
    before = [len(clients[index].heartbeats) for index in sorted(clients.front_ends)]
    for _ in range(seconds * 8):
        time.now_s += 0.125
        clients.turn()
        then()
    after = [len(clients[index].heartbeats) for index in sorted(clients.front_ends)]
    return [b - a for a, b in zip(before, after, strict=True)]


def test_each_client_hears_something_every_second_also_beside_one_that_is_busy() -> None:
    time = Time()
    clients = clients_of(1, 2, clock=time)
    clients.send(1, a_request("r", max_tokens=400))

    counts = count_heartbeats(clients, time, 20, lambda: clients.acknowledge(1))

    assert counts[1] == 0, "its tokens stand for heartbeats"
    assert counts[0] == counts[2] == 20
    executed = [heartbeat.num_executed for heartbeat in clients[2].heartbeats]
    assert executed == sorted(set(executed)), "it knows that steps are computed"


def test_heartbeats_to_a_client_without_credit_stop_after_a_minute_until_it_acknowledges() -> None:
    time = Time()
    clients = clients_of(1, clock=time, credit_steps=2)
    clients.send(1, a_request("r", max_tokens=400))
    for _ in range(5):
        clients.turn()

    counts = count_heartbeats(clients, time, 300, lambda: clients.acknowledge(0))

    assert counts == [300, 60]
    clients.acknowledge(1)
    clients.turn()
    clients.turn()
    assert count_heartbeats(clients, time, 3, lambda: None) == [3, 3]


def test_a_step_that_has_nothing_for_a_client_sends_it_nothing() -> None:
    clients = clients_of(1, 2)
    clients.send(1, a_request("r", max_tokens=50))
    num_messages = len(clients[2].messages)

    clients.run()

    assert len(clients[2].messages) == num_messages


def test_an_ack_gives_credit_to_its_client_alone() -> None:
    clients = clients_of(1, 2, credit_steps=2)
    for index in (1, 2):
        clients.send(index, EngineCoreRequest(f"r{index}", [1], SamplingParams(max_tokens=30, seed=1)))
    clients.run(acknowledging=(0,))
    num_rows = len(clients[1].rows)
    clients.send(2, Ack(clients[2].num_taken))

    clients.run(acknowledging=(0,))

    assert len(clients[1].rows) == num_rows
    assert len(clients[2].rows) == num_rows + 2
