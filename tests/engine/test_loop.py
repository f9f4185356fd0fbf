"""The engine's loop with a link and a clock of the test's own: when it waits, sends, tells that it turns, and ends."""

from __future__ import annotations

import pytest

from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.fake import load_fake
from trio_llm.engine.loop import HEARTBEAT_INTERVAL_S, run_loop
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import (
    Ack,
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
    """Gives one batch of messages a turn. Its clock moves on by what the loop waits for, and by `step_s` a turn."""

    def __init__(self, turns: list[list[ToEngine]], *, step_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []
        self.sent: list[tuple[float, FromEngine]] = []
        self._turns = iter(turns)
        self._step_s = step_s

    def clock(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self.waits_s.append(timeout_s)
        messages = next(self._turns, None)
        if messages is None:
            raise ScriptIsOver
        self.now_s += self._step_s if messages else max(timeout_s, self._step_s)
        return messages

    def send(self, message: FromEngine) -> None:
        self.sent.append((self.now_s, message))


def run(link: ScriptedLink, monkeypatch: pytest.MonkeyPatch, *, fail_at_step: int | None = None) -> None:
    config = EngineConfig(fake=FakeEngineConfig(model_dir="/m", fail_at_step=fail_at_step), num_gpu_blocks_override=16)
    core = EngineCore(load_fake(config, lambda *_: None, model_dir="/m"), config, epoch=EPOCH)
    monkeypatch.setattr("trio_llm.engine.loop.time.monotonic", link.clock)
    run_loop(core, link)


def a_request(max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1], SamplingParams(max_tokens=max_tokens, seed=1))


def test_an_idle_engine_sends_a_heartbeat_an_interval_and_waits_between(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedLink([[], [], []])

    with pytest.raises(ScriptIsOver):
        run(link, monkeypatch)

    interval = HEARTBEAT_INTERVAL_S
    assert link.sent == [(1000.0 + n * interval, Heartbeat(EPOCH)) for n in (1, 2, 3)]
    assert link.waits_s == [interval] * 4


def test_a_busy_engine_never_waits_and_its_tokens_stand_for_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedLink([[a_request(5)], *[[]] * 4], step_s=2 * HEARTBEAT_INTERVAL_S)

    with pytest.raises(ScriptIsOver):
        run(link, monkeypatch)

    assert [type(message) for _, message in link.sent] == [EngineCoreOutputs] * 5
    assert link.waits_s[1:5] == [0.0] * 4
    assert link.waits_s[5] == HEARTBEAT_INTERVAL_S, "idle again: the interval counts from the last message"


def test_what_was_sent_puts_the_next_heartbeat_off(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedLink([[UtilityCall(1, "ping")], [], []], step_s=0.25)

    with pytest.raises(ScriptIsOver):
        run(link, monkeypatch)

    assert [(at_s, type(message)) for at_s, message in link.sent] == [
        (1000.25, EngineCoreOutputs),
        (1001.25, Heartbeat),
        (1002.25, Heartbeat),
    ]


def test_messages_that_need_no_answer_do_not_put_the_heartbeat_off(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedLink([[Ack(1)] for _ in range(8)], step_s=0.25)

    with pytest.raises(ScriptIsOver):
        run(link, monkeypatch)

    assert [(at_s, message) for at_s, message in link.sent] == [
        (1001.0, Heartbeat(EPOCH)),
        (1002.0, Heartbeat(EPOCH)),
    ]


def test_an_executor_that_raises_ends_the_loop_with_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedLink([[a_request(10)], *[[]] * 9])

    with pytest.raises(RuntimeError, match="lost at step 3"):
        run(link, monkeypatch, fail_at_step=3)

    assert [type(message) for _, message in link.sent] == [EngineCoreOutputs] * 2
