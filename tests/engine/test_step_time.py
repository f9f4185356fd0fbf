"""Steps in which answers are generated keep to the step time target, by a clock and a device of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.support.clocked_executor import Clock, ClockedExecutor
from tests.support.one_client import step
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.scheduling.step import StepPlan
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

FAKE = FakeEngineConfig(model_dir="/m")


def slow_cpu_s(plan: StepPlan) -> float:
    """30 ms, and 4 ms per prompt token."""
    return 0.03 + 0.004 * (plan.num_tokens - plan.num_decodes)


def fast_gpu_s(plan: StepPlan) -> float:
    return 0.005 + 0.00002 * (plan.num_tokens - plan.num_decodes)


class Engine:
    """A core over a device with a clock."""

    def __init__(self, executor: ClockedExecutor, config: EngineConfig, clock: Clock) -> None:
        self.executor = executor
        self.core = EngineCore(executor, config, epoch=1, clock=clock)
        self.clock = clock
        self.tokens: dict[str, list[int]] = {}
        self.token_times_s: dict[str, list[float]] = {}

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        prompt = [(7 * i + num_prompt_tokens) % 200 for i in range(num_prompt_tokens)]
        self.tokens[request_id], self.token_times_s[request_id] = [], []
        self.core.handle(EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=1)))

    def turn(self) -> None:
        outputs = step(self.core)
        for row in outputs.outputs if outputs else []:
            self.tokens[row.request_id] += row.new_token_ids
            self.token_times_s[row.request_id].append(self.clock.now_s)

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.is_busy:
                return
            self.turn()
        raise AssertionError("the engine is never done")

    def longest_pause_s(self, request_id: str) -> float:
        times_s = self.token_times_s[request_id]
        return max(after - before for before, after in pairwise(times_s))


def an_engine(step_s: Callable[[StepPlan], float], *, target_s: float = 0.2, run_ahead: int = 0) -> Engine:
    clock = Clock(100.0)
    executor = ClockedExecutor(clock, step_s, fake=FAKE)
    return Engine(executor, EngineConfig(fake=FAKE, step_time_target_s=target_s, run_ahead=run_ahead), clock)


def serve_a_long_prompt_beside_an_answer(engine: Engine) -> None:
    engine.add("answer", 40, max_tokens=100)
    for _ in range(4):
        engine.turn()
    engine.add("long prompt", 1500, max_tokens=5)
    engine.run()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_on_a_slow_cpu_a_long_prompt_delays_no_token_beyond_the_target(run_ahead: int) -> None:
    engine = an_engine(slow_cpu_s, run_ahead=run_ahead)

    serve_a_long_prompt_beside_an_answer(engine)

    mixed = [seconds for plan, seconds in engine.executor.steps if plan.num_decodes]
    assert max(mixed) <= 0.2
    assert engine.longest_pause_s("answer") <= 0.2 + 1e-9
    assert max(plan.num_tokens for plan, _ in engine.executor.steps if plan.num_decodes) > 32, "nor is it starved"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_on_a_fast_device_the_prompt_gets_the_whole_token_budget(run_ahead: int) -> None:
    engine = an_engine(fast_gpu_s, run_ahead=run_ahead)
    engine.add("first", 1000, max_tokens=2)
    engine.run()
    engine.executor.steps.clear()

    serve_a_long_prompt_beside_an_answer(engine)

    assert [plan.num_tokens for plan, _ in engine.executor.steps].count(512) == 2


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_step_launched_ahead_is_not_charged_for_the_step_before_it(run_ahead: int) -> None:
    """20 ms, and 1 ms per prompt token: 180 tokens fit into 0.2 s, in whole blocks 160."""
    engine = an_engine(lambda plan: 0.02 + 0.001 * (plan.num_tokens - plan.num_decodes), run_ahead=run_ahead)

    serve_a_long_prompt_beside_an_answer(engine)

    plans = [plan for plan, _ in engine.executor.steps if plan.num_decodes]
    assert max(plan.num_tokens - plan.num_decodes for plan in plans) == 160


def test_without_a_target_a_step_takes_as_long_as_its_tokens_do() -> None:
    engine = an_engine(slow_cpu_s, target_s=0)

    serve_a_long_prompt_beside_an_answer(engine)

    assert engine.longest_pause_s("answer") > 2.0


def test_a_prompt_alone_gets_the_whole_token_budget_on_a_slow_cpu_too() -> None:
    engine = an_engine(slow_cpu_s)
    engine.add("first", 1500, max_tokens=3)
    engine.run()
    engine.add("second", 1400, max_tokens=1)

    engine.run()

    prefills = [plan.num_tokens for plan, _ in engine.executor.steps if not plan.num_decodes]
    assert prefills == [512, 512, 476, 512, 512, 376]


def test_a_pause_between_steps_does_not_count_as_time_of_a_step() -> None:
    engine = an_engine(fast_gpu_s)
    engine.add("first", 1000, max_tokens=2)
    engine.run()
    engine.clock.now_s += 3600
    engine.executor.steps.clear()

    serve_a_long_prompt_beside_an_answer(engine)

    assert [plan.num_tokens for plan, _ in engine.executor.steps].count(512) == 2


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_tokens_do_not_depend_on_the_target(run_ahead: int) -> None:
    answers = []
    for step_s, target_s in ((slow_cpu_s, 0.2), (slow_cpu_s, 0.05), (slow_cpu_s, 0), (fast_gpu_s, 0.2)):
        engine = an_engine(step_s, target_s=target_s, run_ahead=run_ahead)
        serve_a_long_prompt_beside_an_answer(engine)
        answers.append(engine.tokens)

    assert answers[1:] == answers[:1] * 3
