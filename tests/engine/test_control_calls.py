"""Control calls in the engine: between steps, idempotent, and no token of any request is changed by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_core import a_core, a_request, run
from tests.support.one_client import step, take_answers
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.device import DeviceLostError, WeightsLocation
from trio_llm.engine.executor.fake import load_fake
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Abort, Continue, EngineCoreOutput, EngineCoreOutputs, UtilityCall, UtilityResult

AWAKE = {"sleep_level": 0, "weights_asleep": False, "kv_cache_asleep": False}


class Engine:
    """A core, with what came of each call and each request."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.results: dict[int, UtilityResult] = {}
        self.messages: list[EngineCoreOutputs] = []
        self.rows: list[EngineCoreOutput] = []
        self._num_calls = 0

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.core.handle(message)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for answer in take_answers(self.core):
                self.take(answer)
            if outputs := step(self.core):
                self.take(outputs)

    def take(self, outputs: EngineCoreOutputs) -> None:
        self.messages.append(outputs)
        self.rows += outputs.outputs
        self.results |= {result.call_id: result for result in outputs.utility_results}

    def run(self) -> None:
        """Step until the engine has nothing to do."""
        for _ in range(1000):
            if not self.core.is_busy:
                return
            self.step()
        raise AssertionError("the engine is never done")

    def begin(self, method: str, *args: Any) -> int:
        self._num_calls += 1
        self.send(UtilityCall(self._num_calls, method, list(args)))
        return self._num_calls

    def call(self, method: str, *args: Any) -> UtilityResult:
        """Make a call that is answered at once."""
        number = self.begin(method, *args)
        for _ in range(3):
            if number in self.results:
                return self.results[number]
            assert self.core.is_busy
            self.step()
        raise AssertionError(f"{method} is not answered")

    def ask(self, method: str, *args: Any) -> Any:
        result = self.call(method, *args)
        assert result.error is None, result.error
        return result.value

    def tokens(self, request_id: str = "r") -> list[int]:
        return [t for row in self.rows if row.request_id == request_id for t in row.new_token_ids]

    def end(self, request_id: str = "r") -> str | None:
        reasons = [row.finish_reason for row in self.rows if row.request_id == request_id and row.finish_reason]
        assert len(reasons) <= 1, "a request has two ends"
        return reasons[0] if reasons else None

    @property
    def has_all_blocks(self) -> bool:
        return self.core.stats.num_free_blocks == self.core.stats.num_blocks


def an_engine(**settings: Any) -> Engine:
    return Engine(a_core(**settings))


def undisturbed(request: Any) -> list[int]:
    return [token for row in run(a_core(), request) for token in row.new_token_ids]


LONG = a_request(prompt=[5] * 40, max_tokens=30)


# -------------------------------------------------------------------------------------------- sleep


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 9])
def test_a_running_request_sleeps_and_goes_on_with_the_same_tokens(level: int, num_steps: int, run_ahead: int) -> None:
    engine = an_engine(run_ahead=run_ahead)
    engine.send(LONG)
    engine.step(num_steps)

    state = engine.ask("sleep", level)
    engine.run()
    asleep = engine.tokens()

    assert (state["sleep_level"], state["weights_asleep"], state["kv_cache_asleep"]) == (level, True, True)
    assert engine.has_all_blocks
    assert engine.core.stats.num_cached_blocks == 0
    assert engine.ask("collective_rpc", "memory_info")["kv_cache_bytes"] == 0
    assert len(asleep) < 30
    engine.ask("wake_up")
    engine.run()
    assert engine.tokens() == undisturbed(LONG)
    assert engine.end() == "length"


@pytest.mark.parametrize("parts", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_parts_wake_one_by_one_and_nothing_runs_before_the_last(parts: tuple[str, str]) -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(5)
    engine.ask("sleep", 2)
    before = engine.tokens()

    state = engine.ask("wake_up", parts[0])
    engine.run()

    assert state[f"{parts[0]}_asleep"] is False
    assert state[f"{parts[1]}_asleep"] is True
    assert engine.tokens() == before
    assert AWAKE.items() <= engine.ask("wake_up", parts[1]).items()
    engine.run()
    assert engine.tokens() == undisturbed(LONG)


def test_a_session_that_slept_between_two_inputs_goes_on_as_if_it_had_not() -> None:
    first = a_request(prompt=[7] * 40, resumable=True)
    second = Continue("r", [8] * 9, SamplingParams(max_tokens=4, seed=1))
    plain, slept = an_engine(), an_engine()
    for engine in (plain, slept):
        engine.send(first)
        engine.run()
    assert not slept.has_all_blocks
    slept.ask("sleep", 1)
    assert slept.has_all_blocks
    slept.ask("wake_up")
    for engine in (plain, slept):
        engine.send(second)
        engine.run()

    assert slept.tokens() == plain.tokens()
    assert len(slept.tokens()) == 7


@pytest.mark.parametrize(("method", "args"), [("sleep", [1]), ("sleep", [2]), ("wake_up", []), ("resume", [])])
def test_the_same_call_again_changes_nothing(method: str, args: list[Any]) -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(4)

    first, second = engine.ask(method, *args), engine.ask(method, *args)

    assert first == second
    engine.ask("wake_up")
    engine.run()
    assert engine.tokens() == undisturbed(LONG)


def test_requests_that_come_while_all_sleeps_wait_and_can_be_aborted() -> None:
    engine = an_engine()
    engine.ask("sleep", 1)
    engine.send(a_request("a"), a_request("b"), Abort(["a"]))
    engine.run()
    assert engine.end("a") == "abort"
    assert engine.end("b") is None

    engine.ask("wake_up")
    engine.run()

    assert engine.end("b") == "length"
    engine.ask("check_scheduler")


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("sleep", [0], "level"),
        ("sleep", [3], "level"),
        ("sleep", [True], "level"),
        ("sleep", ["1"], "level"),
        ("wake_up", ["cache"], "tags"),
        ("wake_up", [None], "tags"),
        ("pause", ["stop", True], "mode"),
        ("pause", [None, True], "mode"),
        ("update_weights", ["/no/such/directory", "v"], "not a directory"),
        ("update_weights", [5, "v"], "not a directory"),
        ("update_weights", ["", "v"], "not a directory"),
        ("update_weights", [".", ""], "version"),
        ("update_weights", [".", None], "version"),
        ("update_weights", [".", "v" * 257], "version"),
    ],
)
def test_wrong_arguments_are_the_callers_fault_and_change_nothing(method: str, args: list[Any], words: str) -> None:
    engine = an_engine()
    before = engine.ask("control_state")

    result = engine.call(method, *args)

    assert result.error_kind == "invalid"
    assert words in str(result.error)
    assert engine.ask("control_state") == before


def test_a_part_that_cannot_wake_stays_asleep_and_may_be_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(4)
    engine.ask("sleep", 1)
    move, executor = engine.core._executor.move, engine.core._executor

    def fail(weights: WeightsLocation, *, has_cache: bool) -> None:
        if has_cache:
            raise MemoryError("no memory for a cache")
        move(weights, has_cache=has_cache)

    monkeypatch.setattr(executor, "move", fail)
    result = engine.call("wake_up")

    assert "no memory for a cache" in str(result.error)
    assert result.error_kind == "failed"
    state = engine.ask("control_state")
    assert (state["weights_asleep"], state["kv_cache_asleep"]) == (False, True)
    monkeypatch.undo()
    assert AWAKE.items() <= engine.ask("wake_up").items()
    engine.run()
    assert engine.tokens() == undisturbed(LONG)


def test_a_device_that_is_lost_in_a_call_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine()

    def fail(folder: Path) -> None:
        raise DeviceLostError("half of the weights are new")

    monkeypatch.setattr(engine.core._executor, "update_weights", fail)

    with pytest.raises(DeviceLostError):
        engine.begin("update_weights", ".", "v")


def test_a_step_in_flight_that_fails_while_a_call_waits_for_it_ends_the_engine() -> None:
    engine = an_engine(run_ahead=1, fail_at_step=3)
    engine.send(a_request(prompt=[1], max_tokens=20))
    engine.step(3)

    with pytest.raises(RuntimeError, match="lost at step 3"):
        engine.begin("sleep", 1)


# -------------------------------------------------------------------------------------------- pause


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_pause_that_aborts_ends_all_and_new_ones_wait_for_the_resume(run_ahead: int) -> None:
    engine = an_engine(run_ahead=run_ahead)
    engine.send(LONG, a_request("idle", [3], resumable=True, max_tokens=1))
    engine.step(6)
    engine.send(a_request("waiting", [9] * 500, max_tokens=2))

    engine.ask("pause", "abort", True)
    engine.send(a_request("new"))
    engine.run()

    assert [engine.end(name) for name in ("r", "waiting", "new")] == ["abort", "abort", None]
    assert [row.finish_reason for row in engine.rows if row.request_id == "idle"] == ["length", "abort"]
    assert engine.has_all_blocks
    engine.ask("resume")
    engine.run()
    assert engine.tokens("new") == undisturbed(a_request("new"))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_pause_that_keeps_stops_at_once_and_computes_nothing_twice(run_ahead: int) -> None:
    engine = an_engine(run_ahead=run_ahead)
    engine.send(LONG)
    engine.step(8)

    engine.ask("pause", "keep", True)
    engine.run()
    before = engine.tokens()
    engine.send(a_request("new"))
    engine.step(5)

    assert engine.tokens() == before
    assert not engine.core.is_busy
    assert not engine.has_all_blocks
    engine.ask("resume")
    engine.run()
    assert engine.tokens() == undisturbed(LONG)
    assert engine.end("new") == "length"
    assert engine.core.stats.num_preempted == 0


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("clears", [False, True])
def test_a_pause_empties_the_prefix_cache_only_if_it_is_asked_to(mode: str, clears: bool) -> None:
    engine = an_engine()
    engine.send(a_request("a", [1] * 40))
    engine.run()

    engine.ask("pause", mode, clears)
    engine.ask("resume")
    engine.send(a_request("b", [1] * 40))
    engine.run()

    assert [row.num_cached_tokens for row in engine.rows if row.start == 0] == [0, 0 if clears else 32]


def test_a_pause_that_waits_lets_the_begun_ones_end_and_is_answered_then() -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(5)
    engine.ask("pause", "wait", True)
    engine.send(a_request("new"), a_request("first in line", priority=-1))
    number = engine.begin("wait_paused")
    engine.step(3)
    assert number not in engine.results

    engine.run()

    assert engine.results[number].value is True
    assert engine.tokens() == undisturbed(LONG)
    assert (engine.end("new"), engine.end("first in line")) == (None, None)
    assert engine.core.stats.num_cached_blocks == 0
    assert engine.ask("wait_paused") is True
    engine.ask("resume")
    engine.run()
    assert (engine.end("new"), engine.end("first in line")) == ("length", "length")


def test_a_pause_that_waits_also_waits_for_those_that_lost_their_blocks() -> None:
    engine = an_engine()
    engine.send(*[a_request(f"r{i}", [i + 1] * 60, max_tokens=100) for i in range(4)])
    engine.step(60)
    engine.ask("sleep", 1)
    engine.ask("wake_up")
    engine.ask("pause", "wait", False)
    engine.send(a_request("new"))
    number = engine.begin("wait_paused")

    engine.run()

    assert engine.results[number].value is True
    for i in range(4):
        assert engine.tokens(f"r{i}") == undisturbed(a_request("x", [i + 1] * 60, max_tokens=100))
    assert engine.end("new") is None


@pytest.mark.parametrize(("method", "args"), [("resume", []), ("pause", ["keep", False])])
def test_a_pause_that_is_undone_before_its_end_says_so(method: str, args: list[Any]) -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(5)
    engine.ask("pause", "wait", True)
    number = engine.begin("wait_paused")

    engine.ask(method, *args)

    assert engine.results[number].value is False


def test_a_wait_ends_when_the_requests_it_waits_for_are_aborted() -> None:
    engine = an_engine()
    engine.send(LONG)
    engine.step(5)
    engine.ask("pause", "wait", True)
    number = engine.begin("wait_paused")

    engine.ask("pause", "abort", True)

    assert engine.results[number].value is True


def test_the_next_input_of_a_session_waits_in_a_pause_that_waits() -> None:
    engine = an_engine()
    engine.send(a_request(resumable=True))
    engine.run()
    engine.ask("pause", "wait", False)
    engine.send(Continue("r", [5], SamplingParams(max_tokens=3, seed=1)))
    engine.run()
    assert len(engine.tokens()) == 3

    engine.ask("resume")
    engine.run()

    assert len(engine.tokens()) == 6


def test_a_request_that_an_earlier_engine_had_begun_ends_in_a_pause_that_waits() -> None:
    engine = an_engine()
    engine.ask("pause", "wait", False)
    engine.send(a_request(max_tokens=6, output_token_ids=[1, 2]), a_request("new"))

    engine.run()

    assert (engine.end(), engine.end("new")) == ("length", None)


# ------------------------------------------------------------------------------------------ the rest


def test_after_a_reset_no_request_finds_what_was_computed_before() -> None:
    engine = an_engine()
    for name in ("a", "b"):
        engine.send(a_request(name, [1] * 40))
        engine.run()
    engine.ask("reset_prefix_cache")
    engine.send(a_request("c", [1] * 40))
    engine.run()

    cached = {row.request_id: row.num_cached_tokens for row in engine.rows if row.start == 0}
    assert cached == {"a": 0, "b": 32, "c": 0}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_new_weights_count_from_the_next_token_and_every_message_says_whose_its_tokens_are(
    tmp_path: Path, run_ahead: int
) -> None:
    engine = an_engine(run_ahead=run_ahead)
    engine.send(LONG)
    engine.step(8)

    state = engine.ask("update_weights", str(tmp_path), "v2")
    old = [t for m in engine.messages if m.weight_version == "default" for row in m.outputs for t in row.new_token_ids]
    engine.run()

    assert (state["weight_version"], state["weights_path"]) == ("v2", str(tmp_path))
    assert old == undisturbed(LONG)[: len(old)] != []
    fresh = an_engine()
    fresh.ask("update_weights", str(tmp_path), "v2")
    fresh.send(a_request(prompt=[5] * 40, max_tokens=30, output_token_ids=old))
    fresh.run()
    assert engine.tokens() == old + fresh.tokens()
    assert engine.tokens() != undisturbed(LONG)
    assert engine.ask("collective_rpc", "model_info")["weight_version"] == "v2"


def test_new_weights_forget_what_the_old_ones_had_cached(tmp_path: Path) -> None:
    engine = an_engine()
    engine.send(a_request("a", [1] * 40))
    engine.run()

    engine.ask("update_weights", str(tmp_path), "v2")
    engine.send(a_request("b", [1] * 40))
    engine.run()

    assert [row.num_cached_tokens for row in engine.rows if row.start == 0] == [0, 0]
    assert engine.tokens("a") != engine.tokens("b")


def test_weights_that_sleep_are_not_updated(tmp_path: Path) -> None:
    engine = an_engine()
    engine.ask("sleep", 1)
    result = engine.call("update_weights", str(tmp_path), "v2")
    assert "wake_up" in str(result.error)

    engine.ask("wake_up", "weights")

    assert engine.ask("update_weights", str(tmp_path), "v2")["weight_version"] == "v2"


@pytest.mark.parametrize("name", ["ping", "check_scheduler", "memory_info", "model_info"])
def test_the_workers_table_has_plain_answers(name: str) -> None:
    engine = an_engine()

    assert engine.ask("collective_rpc", name) is not None


@pytest.mark.parametrize("args", [["no_such"], [None], ["__class__"], ["sleep", 1], []])
def test_what_is_not_in_the_workers_table_is_an_error_that_names_what_is(args: list[Any]) -> None:
    engine = an_engine()

    result = engine.call("collective_rpc", *args)

    assert result.error_kind == ("invalid" if args else "failed")
    if args:
        assert "check_scheduler, memory_info, model_info, ping" in str(result.error)
    engine.send(a_request())
    engine.run()
    assert engine.end() == "length"


def test_arguments_that_a_workers_method_does_not_take_are_the_callers_fault() -> None:
    result = an_engine().call("collective_rpc", "ping", 1)

    assert (result.error_kind, "ping" in str(result.error)) == ("invalid", True)


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000, "a\0b"])
def test_a_path_that_no_file_can_have_is_the_callers_fault(path: str) -> None:
    assert an_engine().call("update_weights", path, "v2").error_kind == "invalid"


def test_profiles_need_a_folder_of_the_operators_and_a_real_device(tmp_path: Path) -> None:
    without = an_engine().call("start_profile")
    config = EngineConfig(fake=FakeEngineConfig(), profile_dir=str(tmp_path))
    engine = Engine(EngineCore(load_fake(config, lambda *_: None, model_dir="/m"), config, epoch=1, clock=lambda: 0.0))

    assert without.error_kind == "unsupported"
    assert "--profile-dir" in str(without.error)
    assert engine.call("start_profile").error_kind == engine.call("stop_profile").error_kind == "unsupported"


# --------------------------------------------------------------------------------------- properties

CALLS = st.one_of(
    st.tuples(st.just("sleep"), st.tuples(st.sampled_from([1, 2]))),
    st.tuples(st.just("wake_up"), st.sampled_from([(), ("weights",), ("kv_cache",)])),
    st.tuples(st.just("pause"), st.tuples(st.sampled_from(["wait", "keep"]), st.booleans())),
    st.tuples(st.sampled_from(["resume", "reset_prefix_cache", "control_state", "wait_paused"]), st.just(())),
)
STEPS = st.integers(1, 4)
REQUESTS = st.sampled_from([1, 20, 40]).map(lambda length: [length] * length)


@settings(max_examples=60)
@given(st.lists(st.one_of(CALLS, STEPS, REQUESTS), max_size=30), st.sampled_from([0, 1]))
def test_no_mix_of_calls_changes_a_token_or_leaks_a_block(script: list[Any], run_ahead: int) -> None:
    engine = an_engine(run_ahead=run_ahead)
    prompts: list[list[int]] = []
    for one in script:
        if isinstance(one, int):
            engine.step(one)
        elif isinstance(one, list):
            engine.send(a_request(f"r{len(prompts)}", one, max_tokens=12))
            prompts.append(one)
        else:
            engine.begin(one[0], *one[1])
        engine.core._scheduler.check()
    engine.begin("wake_up")
    engine.begin("resume")
    engine.run()

    for i, prompt in enumerate(prompts):
        assert engine.tokens(f"r{i}") == undisturbed(a_request("x", prompt, max_tokens=12))
    assert engine.has_all_blocks
    assert len(engine.results) == engine._num_calls
    assert not [result for result in engine.results.values() if result.error]
