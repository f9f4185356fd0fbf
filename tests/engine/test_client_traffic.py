"""Random traffic of several clients: they come, go, come again and stop taking what they are sent, at any moment.

Each gets exactly its rows, whole and in order; tokens are those of each request alone; nothing is left of those that
are gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.scheduling.harness import BLOCK_SIZE
from tests.engine.scheduling.test_pooling_traffic import vector_alone
from tests.engine.scheduling.test_scheduler_properties import expected_answer
from tests.engine.test_mixed_traffic import FAKE, params_strategy, prompts
from tests.support.many_clients import ClientsOfACore
from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.fake import FakeExecutor
from trio_llm.pooling import PoolingKind, PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import NO_SAMPLING, Abort, Continue, EngineCoreOutput, EngineCoreRequest, UtilityCall

INDEXES = (1, 2, 3)
EPOCH = 5


@dataclass
class Asked:
    """One request, and what came of it."""

    index: int
    """Of its client."""
    prompt: list[int]
    expected: list[int] = field(default_factory=list)
    """All that should be generated so far."""
    history: list[int] = field(default_factory=list)
    """Of a session: all tokens before its next input."""
    kind: PoolingKind | None = None
    tokens: list[int] = field(default_factory=list)
    is_idle: bool = False
    is_aborted: bool = False
    end: str | None = None


class Clients(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clients: ClientsOfACore
        self.now_s = 0.0
        self.asked: dict[str, Asked] = {}
        """By id: all requests of clients that are attached."""
        self.num_asked = 0
        self.stopped: set[int] = set()
        """Clients that take nothing, or so the engine must think: they acknowledge nothing."""
        self.num_free: dict[int, int] = {}
        """By client: messages that it may be sent until it acknowledges: its credit, and an answer to each message."""
        self.num_calls = 0
        self.calls: dict[int, tuple[int, bool]] = {}
        """By number: the client, and whether it has its answer."""

    @initialize(
        num_blocks=st.integers(2, 10),
        max_num_seqs=st.integers(1, 4),
        more=st.integers(0, 12),
        credit_steps=st.integers(1, 4),
        keeps_cache=st.booleans(),
        run_ahead=st.integers(0, 1),
    )
    def start(
        self, num_blocks: int, max_num_seqs: int, more: int, credit_steps: int, keeps_cache: bool, run_ahead: int
    ) -> None:
        config = EngineConfig(
            fake=FAKE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more,
            enable_prefix_caching=keeps_cache,
            kv_events=keeps_cache,
            run_ahead=run_ahead,
            credit_steps=credit_steps,
        )
        executor = FakeExecutor(FAKE, num_blocks=num_blocks, model_dir="nowhere", block_size=BLOCK_SIZE)
        core = EngineCore(executor, config, epoch=EPOCH, clock=lambda: self.now_s)
        self.credit_steps, self.run_ahead = credit_steps, run_ahead
        self.max_len = executor.info.max_model_len
        self.clients = ClientsOfACore(core, engine_epoch=EPOCH)
        self.num_free = {0: credit_steps}
        for index in INDEXES:
            self.attach(index)

    @property
    def attached(self) -> list[int]:
        return sorted(self.clients.front_ends)

    def send(self, index: int, message: EngineCoreRequest | Continue | Abort | UtilityCall) -> None:
        self.num_free[index] += 1
        self.clients.send(index, message)
        self.clients.core._scheduler.check()

    # ------------------------------------------------------------------------------------- clients

    @rule(index=st.sampled_from(INDEXES))
    def attach(self, index: int) -> None:
        self.forget(index)
        self.clients.attach(index)
        self.num_free[index] = self.credit_steps + 1

    @rule(index=st.sampled_from(INDEXES))
    def detach(self, index: int) -> None:
        self.forget(index)
        if index in self.clients.front_ends:
            self.clients.detach(index)
        self.clients.core._scheduler.check()

    def forget(self, index: int) -> None:
        self.asked = {name: asked for name, asked in self.asked.items() if asked.index != index}
        self.calls = {number: call for number, call in self.calls.items() if call[0] != index}
        self.stopped.discard(index)

    @rule(index=st.sampled_from((0, *INDEXES)))
    def stop(self, index: int) -> None:
        if index in self.clients.front_ends:
            self.stopped.add(index)

    @rule(index=st.sampled_from((0, *INDEXES)))
    def go_on_taking(self, index: int) -> None:
        self.stopped.discard(index)
        self.acknowledge()

    def acknowledge(self) -> None:
        for index in self.attached:
            if index not in self.stopped:
                self.clients.acknowledge(index)
                self.num_free[index] = max(self.num_free[index], self.credit_steps)

    # ------------------------------------------------------------------------------------ requests

    def answer(self, tokens: list[int], params: SamplingParams) -> list[int]:
        return expected_answer(tuple(tokens), params)[: self.max_len - len(tokens)]

    @rule(
        index=st.sampled_from((0, *INDEXES)),
        prompt=prompts,
        params=params_strategy,
        is_session=st.booleans(),
        priority=st.integers(-1, 1),
        patience_s=st.none() | st.integers(0, 3),
    )
    def add(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        is_session: bool,
        priority: int,
        patience_s: int | None,
    ) -> None:
        if index not in self.clients.front_ends:
            return
        prompt = prompt[: self.max_len - 1]
        answer = self.answer(prompt, params)
        name = self.name(Asked(index, prompt, answer, history=prompt + answer))
        deadline_s = None if is_session else patience_s
        self.send(
            index,
            EngineCoreRequest(name, prompt, params, priority=priority, resumable=is_session, deadline_s=deadline_s),
        )

    @rule(index=st.sampled_from(INDEXES), prompt=prompts, kind=st.sampled_from(["last", "mean"]))
    def add_pooling(self, index: int, prompt: list[int], kind: PoolingKind) -> None:
        if index in self.clients.front_ends:
            prompt = prompt[: self.max_len]
            name = self.name(Asked(index, prompt, kind=kind))
            self.send(index, EngineCoreRequest(name, prompt, NO_SAMPLING, pooling_params=PoolingParams(pooling=kind)))

    def name(self, asked: Asked) -> str:
        self.num_asked += 1
        name = f"r{self.num_asked}"
        self.asked[name] = asked
        return name

    @precondition(lambda self: any(asked.is_idle for asked in self.asked.values()))
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=6), params=params_strategy)
    def go_on(self, data: st.DataObject, token_ids: list[int], params: SamplingParams) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, asked in self.asked.items() if asked.is_idle)))
        asked = self.asked[name]
        asked.is_idle = False
        before = asked.history + token_ids
        if len(before) < self.max_len:
            answer = self.answer(before, params)
            asked.expected = asked.expected + answer
            asked.history = before + answer
        self.send(asked.index, Continue(name, token_ids, params))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), asker=st.none() | st.sampled_from((0, *INDEXES)))
    def abort(self, data: st.DataObject, asker: int | None) -> None:
        """By its client, or by another one, which must change nothing."""
        name = data.draw(st.sampled_from(sorted(self.asked)))
        asked = self.asked[name]
        if asker is not None and asker != asked.index:
            if asker in self.clients.front_ends:
                self.send(asker, Abort([name]))
        elif not asked.is_aborted:
            asked.is_aborted = True
            self.send(asked.index, Abort([name]))

    @rule(index=st.sampled_from((0, *INDEXES)), method=st.sampled_from(["ping", "wait_paused", "reset_prefix_cache"]))
    def ask(self, index: int, method: str) -> None:
        if index in self.clients.front_ends:
            self.call(index, method)

    @rule(
        call=st.sampled_from(
            [("sleep", 1), ("wake_up",), ("pause", "wait", False), ("pause", "keep", True), ("resume",)]
        )
    )
    def control(self, call: tuple[str | int | bool, ...]) -> None:
        self.call(0, *call)

    def call(self, index: int, method: str | int | bool, *args: str | int | bool) -> None:
        self.num_calls += 1
        self.calls[self.num_calls] = (index, False)
        self.send(index, UtilityCall(self.num_calls, str(method), list(args)))

    # --------------------------------------------------------------------------------------- steps

    @rule(seconds=st.integers(1, 2))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        before = {index: (len(one.outputs), len(one.results)) for index, one in self.clients.front_ends.items()}
        taken = self.clients.turn()
        for index, rows in taken.items():
            num_messages, num_results = before[index]
            self.num_free[index] -= len(self.clients[index].outputs) - num_messages
            assert self.num_free[index] >= 0, "more than the client has credit for"
            for row in rows:
                self.take(index, row)
            for result in self.clients[index].results[num_results:]:
                assert result.error is None
                assert self.calls[result.call_id] == (index, False), "another's call, or answered twice"
                self.calls[result.call_id] = (index, True)
        self.check_that_little_waits()
        self.acknowledge()

    def check_that_little_waits(self) -> None:
        """For clients without credit nothing is computed, beyond what was in flight when they lost it."""
        for index in self.attached:
            outbox = self.clients.core._clients[index]
            waiting = Counter(row.request_id for row in outbox.rows if row.new_token_ids)
            assert not waiting or not outbox.has_credit
            assert all(count <= self.run_ahead for count in waiting.values())

    def take(self, index: int, row: EngineCoreOutput) -> None:
        asked = self.asked.get(row.request_id)
        if asked is None or asked.index != index or asked.end is not None:
            # An abort of what is another's, of what is gone, or of what had finished before.
            assert row == EngineCoreOutput(row.request_id, 0, [], finish_reason="abort")
            assert asked is None or asked.index != index or asked.is_aborted
            return
        assert row.start == len(asked.tokens), "a gap or a repeat"
        asked.tokens += row.new_token_ids
        if row.goes_on:
            asked.is_idle = True
        elif row.finish_reason is not None:
            asked.end, asked.is_idle = row.finish_reason, False
        if row.pooled is not None:
            assert asked.kind is not None
            assert row.pooled == vector_alone(asked.prompt, asked.kind)

    # ----------------------------------------------------------------------------------------- end

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        self.call(0, "wake_up")
        self.call(0, "resume")
        self.stopped.clear()
        self.acknowledge()
        num_left = sum(asked.end is None for asked in self.asked.values())
        num_steps = 50 + 4 * (1 + num_left) ** 2 * self.max_len
        while self.clients.core.is_busy:
            assert num_steps > 0, "a request starves"
            num_steps -= 1
            self.step()

        for name, asked in self.asked.items():
            assert asked.tokens == asked.expected[: len(asked.tokens)], name
            assert asked.end is not None or asked.is_idle, f"the end of {name} was not reported"
            if asked.end == "abort":
                assert asked.is_aborted, name
            elif asked.end != "error" and asked.kind is None:
                assert asked.tokens == asked.expected, name
        assert all(is_answered for _, is_answered in self.calls.values()), "a call is not answered"
        for index in self.attached:
            self.send(
                index, Abort([name for name, asked in self.asked.items() if asked.index == index and asked.is_idle])
            )
        self.step()
        stats, clients = self.clients.core.stats, self.clients.core._clients
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_running == stats.num_waiting == 0
        assert clients._owners == {}


Clients.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestClients = Clients.TestCase
