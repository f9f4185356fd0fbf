"""The engine's loop with a link and a clock of the test's own: when it waits, answers, sends heartbeats, and ends."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.support.clocked_executor import Clock, ClockedExecutor
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.loop import run_loop
from trio_llm.engine.outbox import HEARTBEAT_INTERVAL_S
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import (
    Abort,
    Ack,
    AttachClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromEngine,
    Heartbeat,
    ToEngine,
    UtilityCall,
)

EPOCH = 4


class ScriptIsOver(BaseException):
    """Ends the loop from inside the link; nothing in the loop may catch it."""


class ScriptedLink:
    """Gives one batch of messages per turn. Its clock moves on by what the loop waits for, and by `turn_s` per turn."""

    def __init__(self, turns: list[list[ToEngine]], *, turn_s: float = 0.0) -> None:
        self.clock = Clock(1000.0)
        self.waits_s: list[float] = []
        self.sent: list[tuple[float, FromEngine]] = []
        self.events: list[str] = []
        """Steps that begin and messages that are sent, in order."""
        self._turns = iter(turns)
        self._turn_s = turn_s

    def receive(self, timeout_s: float) -> list[tuple[int, ToEngine]]:
        self.waits_s.append(timeout_s)
        messages = next(self._turns, None)
        if messages is None:
            raise ScriptIsOver
        self.clock.now_s += self._turn_s if messages else max(timeout_s, self._turn_s)
        return [(0, message) for message in messages]

    def send(self, client_index: int, message: FromEngine) -> None:
        assert client_index == 0
        self.sent.append((self.clock.now_s, message))
        if isinstance(message, EngineCoreOutputs):
            self.events += [f"answer {result.call_id}" for result in message.utility_results]
            self.events += [f"{row.request_id} {row.finish_reason or 'token'}" for row in message.outputs]

    def attach(self, client: AttachClient) -> None:
        raise AssertionError("no client comes")

    def detach(self, client_index: int) -> None:
        raise AssertionError("no client goes")


def run(link: ScriptedLink, *, step_s: float = 0.0, fail_at_step: int | None = None, **settings: Any) -> None:
    """Run the loop until the script is over, or until an executor's exception."""
    fake = FakeEngineConfig(model_dir="/m", fail_at_step=fail_at_step)
    executor = ClockedExecutor(link.clock, lambda plan: step_s, fake=fake)
    executor.on_launch = lambda: link.events.append("step")
    core = EngineCore(executor, EngineConfig(fake=fake, **settings), epoch=EPOCH, clock=link.clock)
    with contextlib.suppress(ScriptIsOver):
        run_loop(core, link, clock=link.clock)


def a_request(max_tokens: int, request_id: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1], SamplingParams(max_tokens=max_tokens, seed=1))


def test_an_idle_engine_sends_a_heartbeat_per_interval_and_waits_between() -> None:
    link = ScriptedLink([[], [], []])

    run(link)

    interval = HEARTBEAT_INTERVAL_S
    assert link.sent == [(1000.0 + n * interval, Heartbeat(EPOCH)) for n in (1, 2, 3)]
    assert link.waits_s == [interval] * 4


def test_a_busy_engine_never_waits_and_its_tokens_stand_for_heartbeats() -> None:
    link = ScriptedLink([[a_request(5)], *[[]] * 4], turn_s=2 * HEARTBEAT_INTERVAL_S)

    run(link)

    assert [type(message) for _, message in link.sent] == [EngineCoreOutputs] * 5
    assert link.waits_s[1:5] == [0.0] * 4
    assert link.waits_s[5] == HEARTBEAT_INTERVAL_S, "idle again: the interval counts from the last message"


def test_answers_do_not_put_the_heartbeat_off_which_alone_counts_steps_without_rows() -> None:
    link = ScriptedLink([[UtilityCall(1, "ping")], [], []], turn_s=0.25)

    run(link)

    assert [(at_s, type(message)) for at_s, message in link.sent] == [
        (1000.25, EngineCoreOutputs),
        (1001.0, Heartbeat),
        (1002.0, Heartbeat),
    ]


def test_messages_that_need_no_answer_do_not_put_the_heartbeat_off() -> None:
    link = ScriptedLink([[Ack(1)] for _ in range(8)], turn_s=0.25)

    run(link)

    assert [(at_s, message) for at_s, message in link.sent] == [
        (1001.0, Heartbeat(EPOCH)),
        (1002.0, Heartbeat(EPOCH)),
    ]


def test_an_executor_that_raises_ends_the_loop_with_its_exception() -> None:
    link = ScriptedLink([[a_request(10)], *[[]] * 9])

    with pytest.raises(RuntimeError, match="lost at step 3"):
        run(link, fail_at_step=3)

    assert [type(message) for _, message in link.sent] == [EngineCoreOutputs] * 2


# ----------------------------------------------------------------- answers do not wait for a step

A_REFUSED_REQUEST = EngineCoreRequest("empty", [], SamplingParams(max_tokens=1, seed=1))


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (UtilityCall(7, "ping"), "answer 7"),
        (UtilityCall(7, "no such method"), "answer 7"),
        (Abort(["waits"]), "waits abort"),
        (Abort(["runs"]), "runs abort"),
        (Abort(["unknown"]), "unknown abort"),
        (A_REFUSED_REQUEST, "empty error"),
    ],
)
def test_what_needs_no_step_is_answered_before_the_next_one_begins(
    message: ToEngine, answer: str, run_ahead: int
) -> None:
    link = ScriptedLink([[a_request(20, "runs")], [], [a_request(20, "waits"), message], [], []])

    run(link, step_s=5.0, run_ahead=run_ahead)

    at = link.events.index(answer)
    assert link.events[:at].count("step") == 2, "the steps of the two turns before, and no more"
    assert link.events[at:].count("step") == 3, "and the steps go on"


def test_a_request_that_expired_during_a_step_is_answered_before_the_next_one_begins() -> None:
    late = EngineCoreRequest("late", [1], SamplingParams(max_tokens=9, seed=1), deadline_s=3.0)
    link = ScriptedLink([[a_request(20, "runs"), late], [], []])

    run(link, step_s=5.0, max_num_seqs=1)

    assert link.events == ["step", "runs token", "late error", "step", "runs token", "step", "runs token"]


def test_an_answer_costs_at_most_the_step_in_flight() -> None:
    """A ping arrives while a step is computed: it is answered when that step ends, five seconds after it began."""
    link = ScriptedLink([[a_request(20)], [UtilityCall(1, "ping")], [UtilityCall(2, "ping")], []])

    run(link, step_s=5.0)

    answered_s = [at_s for at_s, m in link.sent if isinstance(m, EngineCoreOutputs) and m.utility_results]
    assert answered_s == [1005.0, 1010.0]


def test_pings_in_every_turn_do_not_keep_the_engine_from_its_steps() -> None:
    pings: list[list[ToEngine]] = [[UtilityCall(number, "ping")] for number in range(4)]
    link = ScriptedLink([[a_request(4)], *pings])

    run(link, step_s=5.0)

    assert link.events.count("step") == 4
    assert link.events.count("r length") == 1
