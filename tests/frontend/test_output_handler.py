"""OutputHandler over a scripted engine: what it sends to the engine, its owner and each reader."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.reports import make_report
from tests.support.scripted_core import ScriptedCore
from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineGenerateError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.kv_events import KVEventHub
from trio_llm.frontend.output_handler import OutputHandler
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits
from trio_llm.frontend.requests.collector import RequestOutputCollector
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.statistics.request_clock import RequestClock
from trio_llm.outputs import FinishReason
from trio_llm.sampling import SamplingParams
from trio_llm.testing.answers import LOGITS_WIDTH, MODEL_DIR
from trio_llm.wire.messages import (
    Abort,
    Ack,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Heartbeat,
    Progress,
    SchedulerStats,
    UtilityCall,
    UtilityResult,
)

ACK_STEPS = 4


class HandlerSetUp:
    """A handler that runs over an engine, with notes of what a listener of the engine learns."""

    def __init__(self) -> None:
        self.core = ScriptedCore()
        self.seen: list[object] = []
        self.engine = Engine(0, self.core, EngineConfig(credit_steps=8 * ACK_STEPS))
        self.engine.monitor.is_ready = True
        recorder = StatisticsRecorder([])
        self.requests = RequestRegistry([self.engine], recorder, AdmissionLedger(AdmissionLimits()))
        self.engine.listeners = [self, self.requests.recovery]
        self.handler = OutputHandler(self.engine, self.requests, recorder, KVEventHub(), 128)
        table = Renderer.load(MODEL_DIR, 4096, logits_width=LOGITS_WIDTH).token_table
        self.requests.processor = OutputProcessor(table)
        self._step = 0

    def add(self, request_id: str, external_id: str | None = None) -> InFlightRequest:
        assert self.requests.processor is not None
        params = SamplingParams(max_tokens=9, seed=1)
        request = InFlightRequest(
            self.requests.processor.make_state(EngineCoreRequest(request_id, [1], params), external_id or request_id),
            RequestOutputCollector(params.output_kind),
            RequestClock(0.0),
            make_report(external_id or request_id),
        )
        self.requests.register(request)
        request.state.mark_sent()
        return request

    def on_ready(self, engine: Engine) -> None:
        self.seen.append("ready")

    def on_lost(self, engine: Engine, reason: str) -> None:
        self.seen.append(reason)

    def on_dead(self, engine: Engine, error: EngineDeadError) -> None:
        self.seen.append(error)

    def step(self, *rows: EngineCoreOutput) -> EngineCoreOutputs:
        self._step += 1
        return EngineCoreOutputs(1, self._step, 0.0, list(rows))

    async def say(self, *rows: EngineCoreOutput) -> None:
        """One step's rows, taken before this returns."""
        self.core.say(self.step(*rows))
        await wait_all_tasks_blocked()
        self.requests.check()


@pytest.fixture
async def up(nursery: trio.Nursery) -> HandlerSetUp:
    up = HandlerSetUp()
    nursery.start_soon(up.handler.run)
    return up


def a_row(request_id: str, start: int, *token_ids: int, end: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, start, list(token_ids), finish_reason=end)


async def test_what_the_engine_owes_to_other_front_ends_is_known(up: HandlerSetUp) -> None:
    for num_tokens in (50, 0):
        message = msgspec.structs.replace(up.step(), stats=SchedulerStats(num_tokens_of_others=num_tokens))
        up.core.say(message)
        await wait_all_tasks_blocked()

        assert up.requests.engines[0].others_work == num_tokens


async def test_every_kind_of_message_is_a_sign_of_life_and_rows_and_executed_steps_are_steps(
    up: HandlerSetUp, mock_clock: MockClock
) -> None:
    monitor, progress = up.engine.monitor, Progress(1, "load", 1, 2)
    seen = []
    for message in (
        progress,
        Heartbeat(1),
        Heartbeat(1, num_executed=3),
        Heartbeat(1, num_executed=3),
        up.step(),
        up.step(a_row("unknown", 0, 1)),
    ):
        mock_clock.jump(1)
        up.core.say(message)
        await wait_all_tasks_blocked()
        now_s = trio.current_time()
        seen.append((monitor._last_life_s == now_s, monitor._last_step_s == now_s))

    assert seen == [(True, False), (True, False), (True, True), (True, False), (True, False), (True, True)]
    assert monitor.progress is progress


async def test_answers_of_utility_calls_reach_their_callers_also_beside_rows(up: HandlerSetUp) -> None:
    answers: list[object] = []

    async def call() -> None:
        answers.append(await up.engine.utilities.call("ping"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        (sent,) = up.core.sent
        assert isinstance(sent, UtilityCall)
        up.core.say(EngineCoreOutputs(1, 1, 0.0, utility_results=[UtilityResult(sent.call_id, "pong")]))

    assert answers == ["pong"]


async def test_steps_are_acknowledged_each_so_many_and_once_a_batch(up: HandlerSetUp) -> None:
    for _ in range(2 * ACK_STEPS + 1):
        await up.say()
    assert up.core.sent == [Ack(ACK_STEPS), Ack(2 * ACK_STEPS)]

    up.core.say(*[up.step() for _ in range(5 * ACK_STEPS)])
    await wait_all_tasks_blocked()

    assert up.core.sent[2:] == [Ack(7 * ACK_STEPS + 1)]


async def test_a_reader_that_leaves_is_one_abort_and_the_request_counts_until_the_engine_confirms(
    up: HandlerSetUp,
) -> None:
    request = up.add("a")
    up.requests.leave(request)
    up.requests.leave(request)
    await up.say(a_row("a", 0, 1))

    assert up.core.sent == [Abort(["a"])]
    assert len(up.requests) == 1

    await up.say(a_row("a", 1, end="abort"))

    assert len(up.requests) == 0
    assert up.core.sent == [Abort(["a"])]


async def test_leaving_a_request_that_is_over_tells_the_engine_nothing(up: HandlerSetUp) -> None:
    request = up.add("a")
    await up.say(a_row("a", 0, 1, end="length"))

    up.requests.leave(request)

    assert up.core.sent == []
    assert up.requests.abort("a") == 0


async def test_aborting_on_demand_ends_each_reader_of_that_id_once(up: HandlerSetUp) -> None:
    requests = [up.add("1", "x"), up.add("2", "x"), up.add("3", "y")]

    assert (up.requests.abort("x"), up.requests.abort("x")) == (2, 0)

    ends = [(await request.collector.receive()).outputs[0].finish_reason for request in requests[:2]]
    assert ends == ["abort", "abort"]
    assert up.core.sent == [Abort(["1"]), Abort(["2"])]
    for request in requests[:2]:
        up.requests.leave(request)
    assert up.core.sent == [Abort(["1"]), Abort(["2"])]


async def test_a_row_that_cannot_be_read_fails_its_request_alone_and_aborts_it(up: HandlerSetUp) -> None:
    broken, healthy = up.add("a"), up.add("b")
    await up.say(a_row("a", 0, -1), a_row("b", 0, 1, end="length"))

    with pytest.raises(EngineGenerateError):
        await broken.collector.receive()
    assert (await healthy.collector.receive()).finished
    assert up.core.sent == [Abort(["a"])]
    await up.say(a_row("a", 1, end="abort"))
    assert len(up.requests) == 0


async def test_the_engines_end_gives_each_reader_what_it_is_owed_and_an_error_of_its_own(up: HandlerSetUp) -> None:
    requests = [up.add("a"), up.add("b")]
    await up.say(a_row("a", 0, 1), a_row("b", 0, 2, 3))
    up.core.kill("out of memory")
    await wait_all_tasks_blocked()

    assert [(await request.collector.receive()).outputs[0].token_ids for request in requests] == [[1], [2, 3]]
    errors = []
    for request in requests:
        with pytest.raises(EngineDeadError, match="out of memory") as raised:
            await request.collector.receive()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert [type(seen) for seen in up.seen] == [EngineDeadError]
    assert len(up.requests) == 0
    up.requests.leave(requests[0])
    assert up.core.sent == []


async def test_a_row_of_an_unknown_request_is_dropped(up: HandlerSetUp) -> None:
    request = up.add("a")
    await up.say(a_row("gone", 0, 1, end="length"), a_row("a", 0, 1, end="length"))

    assert (await request.collector.receive()).outputs[0].token_ids == [1]
    assert up.core.sent == []


async def test_a_gap_in_one_request_kills_the_engine(up: HandlerSetUp) -> None:
    request = up.add("a")
    await up.say(a_row("a", 0, 1), a_row("unknown", 7, 1), a_row("a", 3, 1))

    assert (await request.collector.receive()).outputs[0].token_ids == [1]
    with pytest.raises(EngineDeadError, match="has 1 tokens and got a row that starts at 3"):
        await request.collector.receive()


async def test_rows_of_two_engines_keep_the_weight_versions_of_their_own_messages(nursery: trio.Nursery) -> None:
    cores = [ScriptedCore(index) for index in range(2)]
    engines = [Engine(index, core, EngineConfig()) for index, core in enumerate(cores)]
    recorder = StatisticsRecorder([], num_engines=2)
    registry = RequestRegistry(engines, recorder, AdmissionLedger(AdmissionLimits()))
    registry.processor = OutputProcessor(Renderer.load(MODEL_DIR, 4096, logits_width=LOGITS_WIDTH).token_table)
    params = SamplingParams(max_tokens=9, seed=1)
    requests = [registry.submit(EngineCoreRequest(f"r-{i}", [1], params), make_report(f"r-{i}")) for i in range(6)]
    for index, core in enumerate(cores):
        for step in range(2):
            rows = [a_row(f"r-{i}", step, 65) for i in range(index, 6, 2)]
            core.say(EngineCoreOutputs(1, step + 1, 0.0, rows, engine_index=index, weight_version=f"of {index}"))
        nursery.start_soon(OutputHandler(engines[index], registry, recorder, KVEventHub(2), 1).run)
    await wait_all_tasks_blocked()

    versions = {(request.engine_index, request.state.weight_version) for request in requests}
    assert versions == {(0, "of 0"), (1, "of 1")}
