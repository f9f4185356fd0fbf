"""Everything at once: answers, vectors and sessions come, go on, expire and are aborted at any moment, while the engine
sleeps, pauses and forgets its cache. Tokens are those of each request alone, and nothing is lost, doubled or left.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.scheduling.harness import BLOCK_SIZE, LOGITS_WIDTH
from tests.engine.scheduling.test_pooling_traffic import vector_alone
from tests.engine.scheduling.test_scheduler_properties import expected_answer
from tests.support.one_client import step, take_answers
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.base import LaunchedStep
from trio_llm.engine.executor.fake import FakeExecutor
from trio_llm.engine.scheduling.scheduler import Scheduler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.pooling import PoolingKind, PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import (
    NO_SAMPLING,
    Abort,
    Continue,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
)

FAKE = FakeEngineConfig(logits_width=LOGITS_WIDTH, eos_token_ids=(), max_model_len=1024)


class Watched(FakeExecutor):
    """Counts what is computed, and sees that each plan keeps to the limits and serves the first of all."""

    def __init__(self, *, num_blocks: int, config: EngineConfig) -> None:
        super().__init__(FAKE, num_blocks=num_blocks, model_dir="nowhere", block_size=BLOCK_SIZE)
        self.config = config
        self.scheduler: Scheduler
        self.num_computed: Counter[tuple[str, int]] = Counter()
        self.sequences: dict[str, Sequence] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.chunks) <= self.config.max_num_seqs
        first = next(iter(self.scheduler._sequences.running))
        assert first.num_in_flight > 0, "the first of all was passed over"
        for chunk in plan.chunks:
            request_id = chunk.sequence.request_id
            self.sequences[request_id] = chunk.sequence
            self.num_computed.update((request_id, chunk.start + i) for i in range(chunk.count))
        return super().launch(plan)


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=20)
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    seed=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 1.0]),
    stop_token_ids=st.sampled_from([(), (1, 2, 3)]),
)


class Everything(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core: EngineCore
        self.executor: Watched
        self.now_s = 0.0
        self.expected: dict[str, list[int]] = {}
        """All that should be generated for each request, so far."""
        self.tokens: dict[str, list[int]] = {}
        self.history: dict[str, list[int]] = {}
        """By session: all tokens before its next input."""
        self.vectors: dict[str, tuple[list[int], PoolingKind]] = {}
        self.idle: set[str] = set()
        self.over: dict[str, str] = {}
        """Finish reasons."""
        self.aborted: set[str] = set()
        self.calls: dict[int, bool] = {}
        """Answered?"""

    @initialize(
        num_blocks=st.integers(2, 10),
        max_num_seqs=st.integers(1, 4),
        more=st.integers(0, 12),
        keeps_cache=st.booleans(),
        run_ahead=st.integers(0, 1),
    )
    def start(self, num_blocks: int, max_num_seqs: int, more: int, keeps_cache: bool, run_ahead: int) -> None:
        config = EngineConfig(
            fake=FAKE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more,
            enable_prefix_caching=keeps_cache,
            kv_events=keeps_cache,
            run_ahead=run_ahead,
            credit_steps=10**9,
        )
        self.executor = Watched(num_blocks=num_blocks, config=config)
        self.core = EngineCore(self.executor, config, epoch=1, clock=lambda: self.now_s)
        self.executor.scheduler = self.core._scheduler
        self.max_len = self.executor.info.max_model_len

    def handle(self, message: EngineCoreRequest | Continue | Abort | UtilityCall) -> None:
        self.core.handle(message)
        self.core._scheduler.check()

    def answer(self, tokens: list[int], params: SamplingParams) -> list[int]:
        return expected_answer(tuple(tokens), params)[: self.max_len - len(tokens)]

    # ------------------------------------------------------------------------------------ requests

    @rule(
        prompt=prompts,
        params=params_strategy,
        is_session=st.booleans(),
        num_given=st.integers(0, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "salt"]),
        patience_s=st.none() | st.integers(0, 3),
    )
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        is_session: bool,
        num_given: int,
        priority: int,
        salt: str | None,
        patience_s: int | None,
    ) -> None:
        prompt = prompt[: self.max_len - 1]
        answer = self.answer(prompt, params)
        given = answer[: min(num_given, len(answer) - 1)]
        name = f"r{len(self.tokens)}"
        self.expected[name], self.tokens[name], self.history[name] = answer, list(given), prompt + answer
        self.handle(
            EngineCoreRequest(
                name,
                prompt,
                params,
                priority=priority,
                cache_salt=salt,
                resumable=is_session,
                output_token_ids=given,
                deadline_s=None if is_session else patience_s,
            )
        )

    @rule(prompt=prompts, kind=st.sampled_from(["last", "mean"]))
    def add_pooling(self, prompt: list[int], kind: PoolingKind) -> None:
        prompt, name = prompt[: self.max_len], f"r{len(self.tokens)}"
        self.expected[name], self.tokens[name], self.vectors[name] = [], [], (prompt, kind)
        self.handle(EngineCoreRequest(name, prompt, NO_SAMPLING, pooling_params=PoolingParams(pooling=kind)))

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=6), params=params_strategy)
    def go_on(self, data: st.DataObject, token_ids: list[int], params: SamplingParams) -> None:
        name = data.draw(st.sampled_from(sorted(self.idle)))
        self.idle.remove(name)
        before = self.history[name] + token_ids
        if len(before) < self.max_len:
            answer = self.answer(before, params)
            self.expected[name] = self.expected[name] + answer
            self.history[name] = before + answer
        self.handle(Continue(name, token_ids, params))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        if name not in self.over:
            self.aborted.add(name)
            self.handle(Abort([name]))

    # ------------------------------------------------------------------------------------- control

    @rule(
        call=st.sampled_from(
            [("sleep", 1), ("sleep", 2), ("wake_up",), ("wake_up", "weights"), ("wake_up", "kv_cache"), ("resume",)]
            + [("pause", mode, clears) for mode in ("abort", "wait", "keep") for clears in (False, True)]
            + [("resume",), ("wake_up",), ("reset_prefix_cache",), ("wait_paused",)]
        )
    )
    def control(self, call: tuple[str | int | bool, ...]) -> None:
        self.call(*call)

    def call(self, method: str | int | bool, *args: str | int | bool) -> None:
        number = len(self.calls)
        self.calls[number] = False
        self.handle(UtilityCall(number, str(method), list(args)))

    @rule(seconds=st.integers(1, 2))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        for answer in take_answers(self.core):
            self.take_message(answer)
        if outputs := step(self.core):
            self.take_message(outputs)
        self.core._scheduler.check()

    def take_message(self, outputs: EngineCoreOutputs) -> None:
        for row in outputs.outputs:
            self.take(row)
        for result in outputs.utility_results:
            assert result.error is None
            assert not self.calls[result.call_id], "a call is answered twice"
            self.calls[result.call_id] = True

    def take(self, row: EngineCoreOutput) -> None:
        name = row.request_id
        if name in self.over and name in self.aborted:  # it had finished before its abort arrived
            assert row == EngineCoreOutput(name, 0, [], finish_reason="abort")
            return
        assert name not in self.over, "a row after the last one"
        assert row.start == len(self.tokens[name]), "a gap or a repeat"
        self.tokens[name] += row.new_token_ids
        if row.goes_on:
            self.idle.add(name)
        elif row.finish_reason is not None:
            self.over[name] = row.finish_reason
            self.idle.discard(name)
        if row.is_expired:
            assert self.executor.num_computed[name, 0] == 0, "it had begun"
        if row.pooled is not None:
            assert row.pooled == vector_alone(*self.vectors[name])

    # ----------------------------------------------------------------------------------------- end

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.call("wake_up")
        self.call("resume")
        left = [name for name in self.tokens if name not in self.over]
        # The first of all waits until those that run are through, then is served without a pause.
        num_steps = 20 + 2 * (1 + len(left)) * self.max_len * (1 + len(left))
        while self.core.is_busy:
            assert num_steps > 0, "a request starves"
            num_steps -= 1
            self.step()

        for name, expected in self.expected.items():
            reason, tokens = self.over.get(name), self.tokens[name]
            assert tokens == expected[: len(tokens)], name
            assert tokens == expected or reason in ("abort", "error"), name
            assert reason is not None or name in self.idle, "its end was not reported"
        for name, position in self.executor.num_computed:
            times = self.executor.num_computed[name, position]
            assert times <= 1 + self.executor.sequences[name].num_preemptions, "computed twice without a reason"
        assert all(self.calls.values()), "a call is not answered"

        self.core.handle(Abort(sorted(self.idle)))
        self.step()
        assert self.core.stats.num_free_blocks == self.core.stats.num_blocks
        assert self.core.stats.num_running == self.core.stats.num_waiting == 0


Everything.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEverything = Everything.TestCase
