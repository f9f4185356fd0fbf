"""RequestRegistry over two engines that a test plays: whatever happens in whatever order, its invariants hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reports import make_report
from tests.support.scripted_core import ScriptedCore
from trio_llm.errors import EngineDeadError, EngineGenerateError, EngineUnavailableError, OverloadedError
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits
from trio_llm.frontend.requests.balancing import ANYWHERE, Balancer, Routing
from trio_llm.frontend.requests.collector import RequestOutputCollector
from trio_llm.frontend.requests.in_flight import InFlightRequest
from trio_llm.frontend.requests.output.lifecycle import TRANSITIONS, RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.output.state import RequestState
from trio_llm.frontend.requests.registry import RequestRegistry
from trio_llm.frontend.statistics.iteration import StatisticsRecorder
from trio_llm.frontend.text.detokenizer import TokenTable
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import Abort, Continue, EngineCoreOutput, EngineCoreRequest, ToEngine

NUM_ENGINES = 2
DELTA = RequestOutputKind.DELTA


def no_decoding(token_ids: list[int], skip_special_tokens: bool) -> str:
    raise AssertionError("a byte table needs no decoding")


TABLE = TokenTable(
    bytes_by_id=[bytes([b]) for b in range(256)],
    special_ids=frozenset(),
    scheme="bytes",
    decode=no_decoding,
    logits_width=256,
)


class PlayedEngine(ScriptedCore):
    """An engine that has what it was sent, and says what the test lets it say."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.has: dict[str, int] = {}
        """Requests that it has not ended, each with the index of its next token."""

    def send_nowait(self, message: ToEngine) -> None:
        assert self.is_up, "nothing is sent to an engine that is down"
        super().send_nowait(message)
        if isinstance(message, EngineCoreRequest):
            assert message.request_id not in self.has, "it was sent twice"
            self.has[message.request_id] = message.num_earlier_tokens + len(message.output_token_ids)
        elif isinstance(message, Continue):
            assert message.request_id in self.has
        elif isinstance(message, Abort):
            assert set(message.request_ids) <= self.has.keys(), "it cannot abort what it does not have"


class Traffic:
    """A registry, two engines, and all readers."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self.engines = [PlayedEngine(index) for index in range(NUM_ENGINES)]
        self.recorder = StatisticsRecorder([], num_engines=NUM_ENGINES)
        self.registry = RequestRegistry(self.engines, self.recorder, AdmissionLedger(limits or AdmissionLimits()))
        self.registry.processor = OutputProcessor(TABLE)
        self.requests: list[InFlightRequest] = []
        """All that were ever registered; with n > 1 the first child."""

    def submit(
        self, *, n: int = 1, external_id: str = "x", deadline_s: float | None = None, routing: Routing = ANYWHERE
    ) -> InFlightRequest:
        request_id = f"{external_id}-{len(self.requests)}"
        params = SamplingParams(n=n, seed=1, max_tokens=100)
        message = EngineCoreRequest(request_id, [1, 2], params, deadline_s=deadline_s)
        self.requests.append(self.registry.submit(message, make_report(external_id, params), routing))
        return self.requests[-1]

    def open_session(self) -> InFlightRequest:
        blank = EngineCoreRequest(f"s-{len(self.requests)}", [], SamplingParams(max_tokens=9, seed=1), resumable=True)
        self.requests.append(
            self.registry.open_session(blank, RequestOutputCollector(DELTA), make_report("s", blank.params))
        )
        return self.requests[-1]

    def send_input(self, session: InFlightRequest) -> None:
        """The next input of a session, whose answer so far is over."""
        state = session.state
        if state.status is not RequestStatus.IDLE:
            return
        params = SamplingParams(max_tokens=9, seed=1)
        earlier = [*state.request.prompt_token_ids, *state.token_ids]
        message: EngineCoreRequest | Continue = Continue(state.request_id, [3], params)
        if not earlier:
            message = EngineCoreRequest(state.request_id, [3], params, resumable=True)
        admitted: list[bool] = []
        self.registry.queue_input(session, 1, lambda: admitted.append(True))
        if admitted:
            self.registry.send_input(
                session, message, token_ids=[*earlier, 3], num_input_tokens=state.num_prompt_tokens + 1
            )

    def say(self, request: InFlightRequest, *token_ids: int, **fields: Any) -> None:
        """A row of the engine for a request that it has, delivered as the output handler does."""
        engine, request_id = self.engines[request.engine_index], request.state.request_id
        row = EngineCoreOutput(request_id, engine.has[request_id], list(token_ids), **fields)
        engine.has[request_id] += len(token_ids)
        if row.finish_reason is not None and not row.goes_on:
            del engine.has[request_id]
        registry = self.registry
        assert registry.processor is not None
        processed = registry.processor.process(request.state, row)
        if processed is None:
            return
        aborted: list[RequestState] = []
        if processed.num_new_tokens:
            registry.record_tokens(request, processed.num_new_tokens, trio.current_time())
        if processed.output is not None:
            request.collector.put(processed.output)
        if processed.is_expired:
            registry.mark_expired(request)
        if processed.error is not None:
            request.collector.put_error(processed.error)
            aborted += registry.mark_family_aborted(request.state)
        if processed.finish_reason is not None:
            registry.record_end(request, processed.finish_reason)
        if processed.must_abort:
            aborted.append(request.state)
        if processed.is_gone:
            registry.forget(request.state)
        registry.end_in_engine(aborted)

    def lose(self, index: int) -> None:
        self.engines[index].is_up = False
        self.engines[index].has.clear()
        self.registry.recovery.on_lost(self.engines[index], "it died")

    def lose_for_good(self, index: int) -> None:
        self.engines[index].is_up = False
        self.engines[index].has.clear()
        self.engines[index].kill_reason = "gone"
        self.registry.recovery.on_dead(self.engines[index], EngineDeadError("gone"))

    @property
    def is_over(self) -> bool:
        return all(engine.is_dead for engine in self.engines)

    def bring_up(self, index: int) -> None:
        self.engines[index].is_up = True
        self.registry.recovery.on_ready(self.engines[index])

    def confirm_aborts(self) -> None:
        for request in list(self.registry.in_flight.values()):
            if request.state.status is RequestStatus.ABORTING:
                self.say(request, finish_reason="abort")

    def check(self) -> None:
        self.registry.check()
        for engine in self.engines:
            in_engine = {
                request.state.request_id
                for request in self.registry.in_flight.values()
                if request.engine_index == engine.index and request.state.num_tokens_when_sent is not None
            }
            assert in_engine == engine.has.keys()
            assert self.registry.num_expected(engine.index) <= len(engine.has)


OPERATIONS = (
    "submit",
    "submit three choices",
    "open a session",
    "input",
    "end the session",
    "leave",
    "abort",
    "token",
    "end",
    "answer over",
    "error",
    "expired",
    "read on",
    "confirm",
    "death or restart",
    "death or restart",
    "submit to a rank",
    "submit in a conversation",
)


def do(traffic: Traffic, what: str, which: int) -> None:
    """One operation, unless there is nothing to do it with."""
    if traffic.is_over:
        return
    match what:
        case "submit" | "submit three choices" | "submit to a rank" | "submit in a conversation" | "open a session":
            with suppress(OverloadedError, EngineUnavailableError):
                do_as_submitter(traffic, what, which)
        case "confirm":
            traffic.confirm_aborts()
        case "abort":
            traffic.registry.abort("xys"[which % 3])
        case "death or restart" | "death for good":
            do_to_engine(traffic, what, which % NUM_ENGINES)
        case "input" | "end the session" | "leave" | "read on":
            if traffic.requests:
                do_as_reader(traffic, what, traffic.requests[which % len(traffic.requests)])
        case _:
            running = [
                request
                for request in traffic.registry.in_flight.values()
                if request.state.request_id in traffic.engines[request.engine_index].has
            ]
            if running:
                do_as_engine(traffic, what, running[which % len(running)])


def do_as_submitter(traffic: Traffic, what: str, which: int) -> None:
    match what:
        case "submit":
            traffic.submit(deadline_s=1.0)
        case "submit three choices":
            traffic.submit(n=3, external_id="y")
        case "submit to a rank":
            traffic.submit(routing=Routing(data_parallel_rank=which % NUM_ENGINES))
        case "submit in a conversation":
            traffic.submit(routing=Routing(session_id=str(which % 3)))
        case "open a session":
            traffic.open_session()


def do_to_engine(traffic: Traffic, what: str, index: int) -> None:
    engine = traffic.engines[index]
    if not engine.is_dead:
        if what == "death for good":
            traffic.lose_for_good(index)
        else:
            (traffic.lose if engine.is_up else traffic.bring_up)(index)


def do_as_reader(traffic: Traffic, what: str, request: InFlightRequest) -> None:
    is_session = request.state.request.resumable
    match what:
        case "leave":
            traffic.registry.leave(request)
        case "read on":
            if request.collector.must_resubmit:
                traffic.registry.resubmit(request, 5.0)
        case "input" if is_session and request.state.request_id in traffic.registry.in_flight:
            traffic.send_input(request)
        case "end the session" if is_session:
            traffic.registry.end_session(request, "stop")


def do_as_engine(traffic: Traffic, what: str, request: InFlightRequest) -> None:
    """What an engine without a fault may say of a request that it has."""
    status = request.state.status
    match what:
        case "token" if status is not RequestStatus.IDLE:
            traffic.say(request, 65)
        case "end":
            traffic.say(request, finish_reason="length")
        case "answer over" if request.state.request.resumable and status is not RequestStatus.IDLE:
            traffic.say(request, 66, finish_reason="length", goes_on=True)
        case "error":
            traffic.say(request, finish_reason="error", error="NaN")
        case "expired" if request.state.num_tokens == 0 and status is not RequestStatus.IDLE:
            traffic.say(request, finish_reason="error", is_expired=True)


Steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5)), max_size=60)
StepsWithEnds = st.lists(st.tuples(st.sampled_from((*OPERATIONS, "death for good")), st.integers(0, 5)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.one_of(Steps, StepsWithEnds),
    limits=st.builds(
        AdmissionLimits,
        max_num_queued_reqs=st.sampled_from([None, 8]),
        max_num_queued_tokens=st.sampled_from([None, 6]),
    ),
)
def test_whatever_happens_in_whatever_order_the_invariants_hold_and_nothing_stays(
    steps: list[tuple[str, int]], limits: AdmissionLimits
) -> None:
    async def run() -> None:
        traffic = Traffic(limits)
        for what, which in steps:
            do(traffic, what, which)
            traffic.check()
        for request in traffic.requests:
            traffic.registry.leave(request)
            traffic.check()
        traffic.confirm_aborts()
        traffic.check()
        assert len(traffic.registry) == 0
        assert all(not engine.has for engine in traffic.engines)
        assert {request.state.status for request in traffic.requests} <= {RequestStatus.GONE}

    trio.run(run)


@settings(max_examples=100, deadline=None)
@given(steps=Steps)
def test_when_there_is_no_engine_any_more_every_unfinished_reader_gets_the_error_and_nothing_stays(
    steps: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        traffic = Traffic()
        for what, which in steps:
            do(traffic, what, which)
        waiting = [request for request in traffic.registry.in_flight.values() if request.is_unfinished]

        for index in range(NUM_ENGINES):
            traffic.lose_for_good(index)
            traffic.check()

        assert len(traffic.registry) == 0
        assert all(request.state.status is RequestStatus.GONE for request in waiting)
        for collector in {request.collector for request in waiting}:
            with pytest.raises((EngineDeadError, EngineGenerateError)) as caught:
                while True:
                    await collector.receive()
            # One that was on trial when the first engine died is given up then.
            assert caught.type is EngineDeadError or "engines die of this request" in str(caught.value)

    trio.run(run)


# ------------------------------------------------------------------------------------ the table


@contextmanager
def recorded_changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[RequestStatus, RequestStatus]]]:
    """Every change of any request's status."""
    changes: set[tuple[RequestStatus, RequestStatus]] = set()
    move = RequestState.move

    def record(state: RequestState, status: RequestStatus) -> None:
        changes.add((state.status, status))
        move(state, status)

    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "move", record)
        yield changes


async def test_every_change_of_the_table_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_changes(monkeypatch) as changes:
        traffic = Traffic()
        sessions = [traffic.open_session() for _ in range(4)]
        for session in sessions[:3]:
            traffic.send_input(session)
            traffic.say(session, 65, finish_reason="length", goes_on=True)
        traffic.registry.end_session(sessions[0], "stop")  # IDLE, and its engine has it
        traffic.registry.leave(sessions[3])  # IDLE, and it has no input yet
        expired = [traffic.submit(deadline_s=1.0) for _ in range(3)]
        for request in expired:
            traffic.say(request, finish_reason="error", is_expired=True)
        traffic.registry.resubmit(expired[0], 5.0)
        traffic.registry.leave(expired[1])
        traffic.say(expired[0], 65, finish_reason="length")
        traffic.confirm_aborts()
        running = [traffic.submit() for _ in range(4)]
        for index in range(NUM_ENGINES):
            traffic.lose(index)
        traffic.registry.resubmit(expired[2], None)
        traffic.send_input(sessions[1])
        traffic.registry.leave(running[0])
        for index in range(NUM_ENGINES):
            traffic.bring_up(index)
        traffic.registry.leave(running[1])
        traffic.check()

    assert changes == {(old, new) for old, followers in TRANSITIONS.items() for new in followers}


@pytest.mark.parametrize(
    ("old", "new"),
    [(old, new) for old in RequestStatus for new in RequestStatus if new not in TRANSITIONS[old]],
    ids=lambda status: status.name,
)
async def test_no_other_change_is_possible(old: RequestStatus, new: RequestStatus) -> None:
    state = Traffic().submit().state
    state.status = old

    with pytest.raises(AssertionError, match=f"{old} -> {new}"):
        state.move(new)


# ---------------------------------------------------------------------------------- several engines


async def test_a_request_goes_to_the_engine_with_the_fewest_and_all_its_choices_with_it() -> None:
    traffic = Traffic()

    indices = [traffic.submit(n=3).engine_index, traffic.submit().engine_index, traffic.submit(n=2).engine_index]

    assert indices == [0, 1, 1]
    assert [len(engine.has) for engine in traffic.engines] == [3, 3]
    assert traffic.submit().engine_index == 0, "the first one of those with as few"


async def test_what_an_engine_owes_to_other_front_ends_counts_until_it_dies() -> None:
    traffic = Traffic()
    traffic.registry.engines[0].others_work = 10**6

    assert [traffic.submit().engine_index for _ in range(3)] == [1, 1, 1]

    traffic.lose(0)
    traffic.bring_up(0)

    assert traffic.submit().engine_index == 0


async def test_engines_that_are_down_get_no_new_requests_while_another_one_is_up() -> None:
    traffic = Traffic()
    traffic.lose(0)

    indices = [traffic.submit().engine_index for _ in range(3)]
    traffic.lose(1)
    indices.append(traffic.submit().engine_index)
    traffic.check()

    assert indices == [1, 1, 1, 0], "the last one waits, where fewer wait"


async def test_the_inputs_of_a_session_go_to_one_engine() -> None:
    traffic = Traffic()
    session = traffic.open_session()
    for _ in range(3):
        traffic.submit()
        traffic.send_input(session)
        traffic.say(session, 65, finish_reason="length", goes_on=True)

    assert [len([m for m in engine.sent if isinstance(m, Continue)]) for engine in traffic.engines] == [2, 0]


async def test_a_request_goes_to_the_rank_that_it_asks_for_and_waits_for_it() -> None:
    traffic = Traffic()
    to_second = Routing(data_parallel_rank=1)

    assert [traffic.submit(routing=to_second).engine_index for _ in range(3)] == [1, 1, 1]

    traffic.lose(1)
    late = traffic.submit(routing=to_second)
    traffic.check()

    assert {request.state.status.name for request in traffic.requests} == {"UNSENT"}, "the rank is started again"

    traffic.bring_up(1)
    traffic.check()

    assert len(traffic.engines[1].has) == 4
    assert late.state.status is RequestStatus.SENT


async def test_requests_for_a_rank_that_is_gone_move_and_new_ones_are_refused() -> None:
    traffic = Traffic()
    to_second = Routing(data_parallel_rank=1)
    request = traffic.submit(routing=to_second)

    traffic.lose_for_good(1)
    traffic.check()

    assert (request.engine_index, request.state.status) == (0, RequestStatus.SENT)
    with pytest.raises(EngineUnavailableError, match="data_parallel_rank 1"):
        traffic.submit(routing=to_second)


async def test_the_ranks_of_a_front_end_need_not_begin_with_0() -> None:
    engines = [ScriptedCore(0), ScriptedCore(1)]
    recorder = StatisticsRecorder([], num_engines=2)
    ledger = AdmissionLedger(AdmissionLimits())
    registry = RequestRegistry(engines, recorder, ledger, balancer=Balancer(2, first_rank=6))
    registry.processor = OutputProcessor(TABLE)
    message = EngineCoreRequest("a", [1], SamplingParams(seed=1, max_tokens=3))

    registry.submit(message, make_report("a"), Routing(data_parallel_rank=7))

    assert [len(engine.sent) for engine in engines] == [0, 1]


async def test_the_requests_of_an_engine_that_dies_move_to_one_that_is_up_and_stay_there() -> None:
    traffic = Traffic()
    requests = [traffic.submit() for _ in range(4)]
    traffic.say(requests[0], 65)

    traffic.lose(0)
    traffic.check()

    assert [request.state.status.name for request in requests] == ["SENT"] * 4
    assert (traffic.registry.num_expected(0), traffic.registry.num_expected(1)) == (0, 4)
    assert [request.state.num_deaths for request in requests] == [0, 0, 1, 0]
    moved = [message for message in traffic.engines[1].sent if isinstance(message, EngineCoreRequest)][2:]
    assert [(message.request_id, message.output_token_ids) for message in moved] == [("x-0", [65]), ("x-2", [])]

    num_sent = len(traffic.engines[0].sent)
    traffic.bring_up(0)
    traffic.check()

    assert len(traffic.engines[0].sent) == num_sent, "nothing moves back"
    assert traffic.submit().engine_index == 0, "the rank takes part again"


async def test_requests_that_wait_for_two_engines_go_to_the_first_that_is_up() -> None:
    traffic = Traffic()
    requests = [traffic.submit() for _ in range(4)]
    for request in requests:
        traffic.say(request, 65)
    for index in range(NUM_ENGINES):
        traffic.lose(index)
    traffic.check()

    assert {request.state.status.name for request in requests} == {"UNSENT"}

    traffic.bring_up(1)
    traffic.check()

    assert {(request.engine_index, request.state.status.name) for request in requests} == {(1, "SENT")}


async def test_an_idle_session_moves_and_its_next_input_carries_all_before() -> None:
    traffic = Traffic()
    session = traffic.open_session()
    traffic.send_input(session)
    traffic.say(session, 65, finish_reason="length", goes_on=True)

    traffic.lose(0)
    traffic.check()
    traffic.send_input(session)
    traffic.check()

    (message,) = traffic.engines[1].sent
    assert isinstance(message, EngineCoreRequest)
    assert message.prompt_token_ids == [3, 65, 3]
    assert message.num_earlier_tokens == 1


async def test_a_request_that_was_dropped_for_its_deadline_moves_and_is_sent_again_by_its_reader() -> None:
    traffic = Traffic()
    request = traffic.submit(deadline_s=1.0)
    traffic.say(request, finish_reason="error", is_expired=True)

    traffic.lose_for_good(0)
    traffic.check()
    traffic.registry.resubmit(request, None)
    traffic.check()

    assert traffic.engines[1].has.keys() == {"x-0"}


async def test_suspects_do_not_move_to_an_engine_that_lives_while_their_own_is_started_again() -> None:
    traffic = Traffic()
    request, other = traffic.submit(), traffic.submit()
    traffic.say(other, 65)
    traffic.lose(0)
    traffic.bring_up(0)
    traffic.lose(1)
    traffic.bring_up(1)
    traffic.check()

    assert request.state.num_deaths == 2, "it was in both"
    traffic.lose(1)
    traffic.check()

    assert (request.engine_index, request.state.status) == (1, RequestStatus.GONE), "it was on trial there"
    assert (other.engine_index, other.state.status) == (0, RequestStatus.SENT)


async def test_suspects_of_two_engines_are_tried_at_the_same_time() -> None:
    traffic = Traffic()
    requests = [traffic.submit(routing=Routing(data_parallel_rank=index % 2)) for index in range(4)]
    for _ in range(2):
        for index in range(NUM_ENGINES):
            traffic.lose(index)
            traffic.bring_up(index)
        traffic.check()

    assert [request.state.status.name for request in requests] == ["SENT", "SENT", "UNSENT", "UNSENT"]

    traffic.say(requests[0], 65)
    traffic.check()

    assert [request.state.status.name for request in requests] == ["SENT", "SENT", "SENT", "UNSENT"]


async def test_suspects_of_an_engine_that_is_gone_are_tried_one_at_a_time_by_another() -> None:
    traffic = Traffic()
    requests = [traffic.submit(routing=Routing(data_parallel_rank=0)) for _ in range(3)]
    for _ in range(2):
        traffic.lose(0)
        traffic.bring_up(0)

    traffic.lose_for_good(0)
    traffic.check()

    assert [request.state.status.name for request in requests] == ["GONE", "SENT", "UNSENT"]
    assert traffic.engines[1].has.keys() == {"x-1"}

    traffic.say(requests[1], 65)
    traffic.check()

    assert traffic.engines[1].has.keys() == {"x-1", "x-2"}


async def test_each_engines_requests_are_counted_with_it() -> None:
    traffic = Traffic()
    for request in [traffic.submit() for _ in range(3)]:
        traffic.say(request, 65)
    tokens = [
        gathered[1].num_generation_tokens
        for engine in traffic.recorder.engines
        if engine and (gathered := engine.take())
    ]

    assert tokens == [], "tokens alone are worth no record"

    for request in list(traffic.registry.in_flight.values()):
        traffic.say(request, 66, finish_reason="length")
    iterations = [gathered[1] for engine in traffic.recorder.engines if engine and (gathered := engine.take())]

    assert [iteration.num_generation_tokens for iteration in iterations] == [4, 2]
    assert [len(iteration.finished) for iteration in iterations] == [2, 1]


# ------------------------------------------------------------------------------------- the check


@pytest.mark.parametrize(
    "damage",
    [
        "still registered",
        "not sent",
        "sent twice",
        "not counted",
        "wrong engine",
        "a sibling elsewhere",
        "expired and forgotten",
        "unsent beside an engine",
        "a dead engine",
        "no session",
    ],
)
async def test_the_check_finds(damage: str) -> None:
    traffic = Traffic()
    request, family = traffic.submit(), traffic.submit(n=3)
    state = request.state
    traffic.check()
    match damage:
        case "still registered":
            state.status = RequestStatus.GONE
        case "not sent":
            state.num_tokens_when_sent = None
        case "sent twice":
            traffic.registry.in_flight["other"] = request
        case "not counted":
            traffic.registry._ledger.remove(state)
        case "wrong engine":
            request.engine_index = 1
        case "a sibling elsewhere":
            family.engine_index = 0
        case "expired and forgotten":
            state.mark_expired()
        case "unsent beside an engine":
            state.status, state.num_tokens_when_sent = RequestStatus.UNSENT, None
        case "a dead engine":
            traffic.engines[0].is_up = False
        case "no session":
            state.status = RequestStatus.IDLE

    with pytest.raises(AssertionError):
        traffic.registry.check()
