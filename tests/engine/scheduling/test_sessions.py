"""Sessions in the scheduler: their tokens are those of one request, and they do not hold up others."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.scheduling.harness import BLOCK_SIZE, MiniEngine, answer_alone, make_limits
from tests.support.sequences import make_sequence
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue

PARAMS = SamplingParams(max_tokens=4)


def start_session(engine: MiniEngine, name: str, prompt: list[int], params: SamplingParams = PARAMS) -> Sequence:
    sequence = make_sequence(name, prompt, params)
    sequence.is_resumable = True
    return engine.add(sequence)


def give(engine: MiniEngine, name: str, token_ids: list[int], params: SamplingParams = PARAMS) -> None:
    assert engine.scheduler.continue_session(Continue(name, token_ids, params)) is None
    engine.scheduler.check()


def test_an_idle_session_gives_its_blocks_to_a_sequence_that_needs_them_and_computes_again() -> None:
    engine = MiniEngine(make_limits(num_blocks=3, max_model_len=3 * BLOCK_SIZE))
    session = start_session(engine, "s", [1] * (BLOCK_SIZE - 1))
    engine.run(max_steps=10)
    assert session.state is SequenceState.IDLE
    assert len(session.block_ids) == 2

    engine.add(make_sequence("big", [2] * (2 * BLOCK_SIZE + 1), PARAMS))
    engine.run(max_steps=10)
    assert not session.block_ids
    give(engine, "s", [3])
    before = list(session.token_ids)
    engine.run(max_steps=10)

    assert session.token_ids[len(before) :] == answer_alone(before, PARAMS)
    assert engine.num_starts("s") == 2


def test_idle_sessions_give_way_before_any_that_runs() -> None:
    engine = MiniEngine(make_limits(num_blocks=4, max_model_len=3 * BLOCK_SIZE))
    idle = start_session(engine, "idle", [1] * (BLOCK_SIZE - 2))
    engine.run(max_steps=10)
    running = engine.add(make_sequence("a", [2] * (BLOCK_SIZE - 1), SamplingParams(max_tokens=2 * BLOCK_SIZE)))

    engine.run(max_steps=100)

    assert running.num_preemptions == 0
    assert idle.num_preemptions == 1


def test_a_new_input_waits_behind_those_that_wait_already() -> None:
    engine = MiniEngine(make_limits(max_num_seqs=1))
    session = start_session(engine, "s", [1])
    engine.run(max_steps=10)
    first = engine.add(make_sequence("first", [2], PARAMS))
    give(engine, "s", [3])

    engine.step()

    assert first.state is SequenceState.RUNNING
    assert session.state is SequenceState.WAITING
    assert session.block_ids


class SessionTraffic(RuleBasedStateMachine):
    """Sessions and requests come, go on and are aborted at any phase; the harness checks invariants throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: MiniEngine
        self.expected: dict[str, list[int]] = {}
        """All that should be generated for each, so far."""
        self.sequences: dict[str, Sequence] = {}
        self.gone: set[str] = set()

    @initialize(
        num_blocks=st.integers(2, 8),
        max_num_seqs=st.integers(1, 4),
        more=st.integers(0, 12),
        keeps_cache=st.booleans(),
        run_ahead=st.integers(0, 1),
    )
    def start(self, num_blocks: int, max_num_seqs: int, more: int, keeps_cache: bool, run_ahead: int) -> None:
        self.limits: SchedulerLimits = make_limits(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more,
            max_model_len=num_blocks * BLOCK_SIZE,
            keeps_cache=keeps_cache,
        )
        self.engine = MiniEngine(self.limits, run_ahead=run_ahead)

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12), is_session=st.booleans())
    def add(self, prompt: list[int], is_session: bool) -> None:
        prompt = prompt[: self.limits.max_model_len - 1]
        name = f"r{len(self.sequences)}"
        self.sequences[name] = make_sequence(name, prompt, PARAMS)
        self.sequences[name].is_resumable = is_session
        self.engine.add(self.sequences[name])
        self.expected[name] = self.answer(prompt)

    def answer(self, tokens: list[int]) -> list[int]:
        return answer_alone(tokens, PARAMS)[: self.limits.max_model_len - len(tokens)]

    def idle(self) -> list[str]:
        return [name for name, one in self.sequences.items() if one.state is SequenceState.IDLE]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=8))
    def go_on(self, data: st.DataObject, token_ids: list[int]) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        before = self.sequences[name].token_ids + token_ids
        if len(before) >= self.limits.max_model_len:
            row = self.engine.scheduler.continue_session(Continue(name, token_ids, PARAMS))
            assert row is not None
            assert row.finish_reason == "error"
            self.gone.add(name)
            return
        give(self.engine, name, token_ids)
        self.expected[name] = self.expected[name] + self.answer(before)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        self.engine.abort(name)
        self.gone.add(name)

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.run_ahead)
    @rule()
    def begin_step(self) -> None:
        self.engine.begin_step()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def end_step(self) -> None:
        self.engine.end_step()

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.run_ahead)
    @rule()
    def run_on(self) -> None:
        """All that is not idle ends, however many blocks idle sessions hold."""
        self.engine.run(max_steps=2000)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.in_flight:
            self.end_step()
        self.engine.run(max_steps=2000)
        for name, sequence in self.sequences.items():
            tokens = self.engine.tokens[name]
            assert tokens == self.expected[name][: len(tokens)]
            if name not in self.gone:
                assert tokens == self.expected[name]
            assert self.engine.num_starts(name) <= 1 + sequence.num_preemptions
        for name in self.sequences:
            self.engine.abort(name)
        assert self.engine.scheduler.stats().num_free_blocks == self.limits.num_blocks


SessionTraffic.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSessionTraffic = SessionTraffic.TestCase
