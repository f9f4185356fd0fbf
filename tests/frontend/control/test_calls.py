"""Control calls of AsyncLLM: 20 at once while requests run, cancelled anywhere, with errors: the state is defined, and
the next request works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.asking import ask, token_ids
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    NotSupportedError,
    RequestTimeoutError,
    TrioLLMError,
)
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.control.state import ControlState
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import UtilityCall

PARAMS = SamplingParams(max_tokens=40, seed=1)
BOUND_S = 20


async def answer(llm: AsyncLLM) -> list[int]:
    """The tokens of a whole answer."""
    return token_ids(await ask(llm, "hello", PARAMS))


async def start_and_stop_profile(llm: AsyncLLM) -> None:
    await llm.start_profile()
    await llm.stop_profile()


async def refused_adapter(llm: AsyncLLM) -> None:
    await trio.lowlevel.checkpoint()
    for call in (
        lambda: llm.add_lora("a", "b"),
        lambda: llm.remove_lora("a"),
        lambda: llm.pin_lora("a"),
        llm.list_loras,
    ):
        with pytest.raises(NotSupportedError):
            await call()
    await trio.lowlevel.checkpoint()


class Profiler:
    """In place of a device's: it records or does not, and writes a file for what it has recorded."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.num_written = 0

    def start(self, folder: Path) -> None:
        self.folder = self.folder or folder

    def stop(self) -> str | None:
        folder, self.folder = self.folder, None
        if folder is None:
            return None
        self.num_written += 1
        return str(folder / f"{self.num_written}.json")


async def work_through(llm: AsyncLLM, method: str, folder: str) -> None:
    """One call, as a user who takes what may come of it."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "sleep 1": llm.sleep,
        "sleep 2": lambda: llm.sleep(2),
        "wake_up": llm.wake_up,
        "wake_up weights": lambda: llm.wake_up(["weights"]),
        "wake_up kv_cache": lambda: llm.wake_up(["kv_cache"]),
        "is_sleeping": llm.is_sleeping,
        "pause abort": llm.pause_generation,
        "pause wait": lambda: llm.pause_generation(mode="wait"),
        "pause keep": lambda: llm.pause_generation(mode="keep", clear_cache=False),
        "resume": llm.resume_generation,
        "is_paused": llm.is_paused,
        "reset_prefix_cache": llm.reset_prefix_cache,
        "collective_rpc": lambda: llm.collective_rpc("check_scheduler", timeout_s=BOUND_S),
        "update_weights": lambda: llm.update_weights(folder, version="v2"),
        "start_profile": llm.start_profile,
        "stop_profile": llm.stop_profile,
        "start and stop profile": lambda: start_and_stop_profile(llm),
        "a call for adapters": lambda: refused_adapter(llm),
    }
    await calls[method]()


TO_THE_ENGINE = [
    *("sleep 1", "sleep 2", "wake_up", "wake_up weights", "wake_up kv_cache", "is_sleeping"),
    *("pause abort", "pause wait", "pause keep", "resume", "is_paused"),
    *("reset_prefix_cache", "collective_rpc", "update_weights"),
    *("start_profile", "stop_profile", "start and stop profile"),
]
METHODS = [*TO_THE_ENGINE, "a call for adapters"]
"""The last is refused before it gets there."""


@asynccontextmanager
async def open_busy(num_requests: int = 3) -> AsyncIterator[tuple[FakeSetUp, list[str | None]]]:
    """A FakeLLM with requests that run, until the block ends; and how each ended."""
    ends: list[str | None] = []
    params = SamplingParams(max_tokens=400, output_kind=RequestOutputKind.FINAL_ONLY)
    async with open_fake_llm(max_model_len=1000, profile_dir="/profiles") as fake, trio.open_nursery() as nursery:
        profiler = Profiler()
        fake.llm._executor.start_profile = profiler.start  # type: ignore[method-assign]
        fake.llm._executor.stop_profile = profiler.stop  # type: ignore[method-assign]

        async def read(started: trio.Event) -> None:
            async with fake.llm.generate("run along", params) as stream:
                started.set()
                async for output in stream:
                    ends.append(output.outputs[0].finish_reason)

        for _ in range(num_requests):
            started = trio.Event()
            nursery.start_soon(read, started)
            await started.wait()
        with trio.fail_after(BOUND_S):
            yield fake, ends


async def end_well(fake: FakeSetUp) -> None:
    """Wake and resume: the next request works, and what ran before ends."""
    await fake.llm.wake_up()
    await fake.llm.resume_generation()
    assert fake.llm._control.state.is_held is False
    assert len(await answer(fake.llm)) == 40
    await fake.assert_nothing_is_left()


@pytest.mark.parametrize("method", METHODS)
async def test_the_same_call_twenty_times_at_once_while_requests_run(method: str, tmp_path: Path) -> None:
    async with open_busy() as (fake, ends):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(work_through, fake.llm, method, str(tmp_path))
        [state] = await fake.llm._control.fetch_states()

        await end_well(fake)

    expected = "abort" if method == "pause abort" else "length"
    assert ends == [expected] * 3
    assert state.sleep_level == {"sleep 1": 1, "sleep 2": 2}.get(method, 0)
    assert state.pause == {"pause abort": "keep", "pause wait": "wait", "pause keep": "keep"}.get(method, "running")
    assert state.weight_version == ("v2" if method == "update_weights" else "default")


async def test_all_calls_mixed_and_at_once_leave_a_defined_state(tmp_path: Path) -> None:
    async def try_it(llm: AsyncLLM, method: str) -> None:
        try:
            await work_through(llm, method, str(tmp_path))
        except (InvalidRequestError, EngineGenerateError) as error:
            refused.append(str(error))

    refused: list[str] = []
    async with open_busy() as (fake, ends):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                for method in METHODS:
                    if method != "pause abort":
                        nursery.start_soon(try_it, fake.llm, method)
            # One that waits for requests that sleep would wait for ever: somebody must wake them.
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            await fake.llm.wake_up()
            await fake.llm.pause_generation(mode="wait")
        assert [fake.llm._control.state] == await fake.llm._control.fetch_states()

        await end_well(fake)

    assert ends == ["length"] * 3
    assert all("asleep" in text or "undone" in text for text in refused)


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_cancelled_at_any_checkpoint_leaves_a_defined_state(method: str, tmp_path: Path) -> None:
    async with open_busy() as (fake, _):

        async def check() -> None:
            # The engine is where the front end believes it to be, once what has begun is over.
            await fake.llm.reset_prefix_cache()
            known = fake.llm._control.state
            assert [known] == await fake.llm._control.fetch_states()
            assert fake.llm._control._jobs == type(fake.llm._control._jobs)()
            await fake.llm.wake_up()
            await fake.llm.resume_generation()
            assert len(await answer(fake.llm)) == 40

        least = await cancel_at_every_checkpoint(lambda: work_through(fake.llm, method, str(tmp_path)), check)
        await end_well(fake)

    assert least >= 2


async def test_equal_calls_that_wait_next_to_each_other_are_one_and_others_keep_their_order() -> None:
    async with open_fake_llm() as fake:
        fake.llm.stall()
        sent: list[str] = []
        remember = fake.core.on_sent

        def note(message: object) -> None:
            if isinstance(message, UtilityCall):
                sent.append(message.method)

        fake.core.on_sent = note
        async with trio.open_nursery() as nursery:
            # The first one has begun when the second comes, which must count from now on.
            for method in (
                "resume",
                "resume",
                "sleep 1",
                "sleep 1",
                "wake_up",
                "sleep 1",
                "sleep 1",
                "wake_up",
                "wake_up",
            ):
                nursery.start_soon(work_through, fake.llm, method, "")
                await wait_all_tasks_blocked()
            fake.llm.resume()
        fake.core.on_sent = remember

        assert sent == ["resume", "resume", "sleep", "wake_up", "sleep", "wake_up"]
        await end_well(fake)


async def test_a_call_that_nobody_waits_for_any_more_is_not_made_and_one_that_has_begun_is_known_of() -> None:
    async with open_fake_llm() as fake:
        fake.llm.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work_through, fake.llm, "pause keep", "")
            await wait_all_tasks_blocked()
            nursery.start_soon(work_through, fake.llm, "sleep 1", "")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        fake.llm.resume()
        await fake.llm.reset_prefix_cache()

        assert fake.llm._control.state == ControlState(pause="keep")
        assert await fake.llm.is_paused()
        assert not await fake.llm.is_sleeping()
        await end_well(fake)


async def test_new_requests_are_refused_while_the_engine_sleeps_and_running_ones_go_on_after() -> None:
    async with open_fake_llm() as fake:
        with trio.fail_after(BOUND_S):
            await sleep_and_wake_beside_a_stream(fake)


async def sleep_and_wake_beside_a_stream(fake: FakeSetUp) -> None:
    expected = await answer(fake.llm)
    async with fake.llm.generate("hello", PARAMS) as stream:
        first = (await anext(stream)).outputs[0].token_ids
        await fake.llm.sleep()
        assert await fake.llm.is_sleeping()
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match=r"sleeps \(level 1\); wake it up"):
                await answer(fake.llm)
            await fake.llm.check_health()
            await fake.llm.sleep(2)
            await fake.llm.wake_up(["kv_cache"])
            await fake.llm.sleep()
            await fake.llm.wake_up(["weights"])
        await fake.llm.wake_up()

        tokens = first + [t async for output in stream for t in output.outputs[0].token_ids]

    assert tokens == expected == await answer(fake.llm)
    await fake.assert_nothing_is_left()


async def test_requests_that_come_in_a_pause_wait_in_the_line() -> None:
    async with open_fake_llm() as fake:
        await fake.llm.pause_generation()
        assert await fake.llm.is_paused()
        answers: list[list[int]] = []

        async def read() -> None:
            answers.append(await answer(fake.llm))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            assert (answers, fake.llm.num_waiting) == ([], 1)
            await fake.llm.resume_generation()

        assert len(answers[0]) == 40


async def test_a_pause_that_aborts_ends_streams_sessions_and_several_choices_with_that_reason() -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("one", SamplingParams(max_tokens=2, seed=1))
        yield StreamingInput("two", SamplingParams(max_tokens=500, seed=1))

    ends: list[RequestOutput] = []
    params = SamplingParams(max_tokens=60, seed=1)

    async with open_fake_llm(max_model_len=1000) as fake:

        async def read(stream_of: Callable[[], AsyncIterator[RequestOutput]]) -> None:
            async for output in stream_of():
                last = output
            ends.append(last)

        async def session() -> AsyncIterator[RequestOutput]:
            async with fake.llm.generate(inputs(), params) as stream:
                async for output in stream:
                    yield output

        async def choices() -> AsyncIterator[RequestOutput]:
            wanted = SamplingParams(max_tokens=500, n=3, output_kind=RequestOutputKind.FINAL_ONLY)
            async with fake.llm.generate("several", wanted) as stream:
                async for output in stream:
                    yield output

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, session)
            nursery.start_soon(read, choices)
            for _ in range(60):
                await trio.lowlevel.checkpoint()
            await fake.llm.pause_generation()
        await fake.llm.resume_generation()
        await fake.assert_nothing_is_left()

    assert all(output.finished for output in ends)
    assert sorted(len(output.outputs) for output in ends) == [1, 3]
    assert {choice.finish_reason for output in ends for choice in output.outputs} == {"abort"}


async def test_a_pause_that_waits_returns_when_what_runs_is_over() -> None:
    async with open_busy() as (fake, ends):
        await fake.llm.pause_generation(mode="wait")
        await wait_all_tasks_blocked()
        assert ends == ["length"] * 3

        await end_well(fake)


async def test_a_pause_that_waits_can_be_undone_and_says_so() -> None:
    async with open_busy() as (fake, _), trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(EngineGenerateError, match="undone"):
                await fake.llm.pause_generation(mode="wait")

        nursery.start_soon(wait)
        while fake.llm._control.state.pause != "wait":
            await trio.lowlevel.checkpoint()
        await fake.llm.resume_generation()
        await end_well(fake)


async def test_every_output_carries_the_version_of_the_weights_that_made_it(tmp_path: Path) -> None:
    async with open_fake_llm() as fake:
        async with fake.llm.generate("hello", PARAMS) as stream:
            before = [(await anext(stream)).weight_version for _ in range(3)]
            await fake.llm.update_weights(str(tmp_path), version="v2")
            versions = before + [output.weight_version async for output in stream]

        assert set(before) == {"default"}
        assert versions == sorted(versions)
        assert versions[-1] == "v2"
        for kind in RequestOutputKind:
            params = SamplingParams(max_tokens=3, output_kind=kind, n=2)
            async with fake.llm.generate("hello", params) as stream:
                assert {output.weight_version async for output in stream} == {"v2"}


async def test_weights_that_are_not_there_are_the_callers_fault() -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError, match="not a directory"):
            await fake.llm.update_weights("/no/such/folder", version="v2")

        assert fake.llm._control.state == ControlState()
        await end_well(fake)


async def test_a_part_that_cannot_wake_is_known_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fake_llm() as fake:
        await fake.llm.sleep()
        executor = fake.llm._executor
        move = executor.move

        def fail(weights: object, *, has_cache: bool) -> None:
            if has_cache:
                raise MemoryError("none left")
            move(weights, has_cache=has_cache)  # type: ignore[arg-type]

        monkeypatch.setattr(executor, "move", fail)
        with pytest.raises(EngineGenerateError, match="none left"):
            await fake.llm.wake_up()
        assert fake.llm._control.state == ControlState(sleep_level=1, kv_cache_asleep=True)
        monkeypatch.undo()
        await end_well(fake)


@pytest.mark.parametrize("level", [0, 3, -1])
async def test_a_level_that_is_none_is_refused(level: int) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError, match="level"):
            await fake.llm.sleep(level)
        with pytest.raises(InvalidRequestError, match="tags"):
            await fake.llm.wake_up(["everything"])
        with pytest.raises(InvalidRequestError, match="tags"):
            await fake.llm.wake_up("weights")
        with pytest.raises(InvalidRequestError, match="mode"):
            await fake.llm.pause_generation(mode="stop")


async def test_remote_calls_name_what_there_is_and_have_a_time_limit() -> None:
    async with open_fake_llm() as fake:
        (info,) = await fake.llm.collective_rpc("model_info")
        assert info["weight_version"] == "default"
        with pytest.raises(InvalidRequestError, match="check_scheduler, memory_info, model_info, ping"):
            await fake.llm.collective_rpc("shutdown")
        with pytest.raises(InvalidRequestError, match="plain values"):
            await fake.llm.collective_rpc("ping", [{}])  # type: ignore[list-item]
        for timeout_s in (0, -1, float("nan"), float("inf"), 86401, 10**400):
            with pytest.raises(InvalidRequestError, match="timeout"):
                await fake.llm.collective_rpc("ping", timeout_s=timeout_s)


async def test_a_worker_that_does_not_answer_in_time_is_an_error(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_llm() as fake:
        fake.llm.stall()
        with pytest.raises(RequestTimeoutError, match="within 5 seconds"):
            await fake.llm.collective_rpc("ping", timeout_s=5)
        fake.llm.resume()
        assert await fake.llm.collective_rpc("ping")
        assert not fake.llm._engines[0].utilities._waiting


async def test_profiles_need_a_real_engine_and_adapters_are_not_supported() -> None:
    async with open_fake_llm() as fake:
        for work in (
            fake.llm.start_profile,
            fake.llm.stop_profile,
            fake.llm.list_loras,
            lambda: fake.llm.add_lora("a", "b"),
            lambda: fake.llm.remove_lora("a"),
            lambda: fake.llm.pin_lora("a"),
        ):
            with pytest.raises(NotSupportedError):
                await work()


async def test_while_the_model_loads_control_calls_are_refused() -> None:
    async with open_fake_llm(wait_until_ready=False) as fake:
        for method in TO_THE_ENGINE:
            with pytest.raises(EngineUnavailableError):
                await work_through(fake.llm, method, ".")


@pytest.mark.parametrize("method", TO_THE_ENGINE)
async def test_the_engines_death_ends_calls_that_wait_and_those_that_come(method: str) -> None:
    errors: list[TrioLLMError] = []
    async with open_fake_llm() as fake:
        fake.llm.stall()
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(EngineDeadError, match="by the test") as caught:
                    await work_through(fake.llm, method, ".")
                errors.append(caught.value)

            for _ in range(3):
                nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            fake.llm.kill()
        with pytest.raises(EngineDeadError):
            await work_through(fake.llm, method, ".")

    assert len({id(error) for error in errors}) == 3, "one exception object was raised in several tasks"


async def test_leaving_the_block_ends_calls_that_wait_outside_of_it() -> None:
    ends: list[str] = []
    async with trio.open_nursery() as nursery, open_fake_llm() as fake:
        fake.llm.stall()

        async def wait(method: str) -> None:
            with pytest.raises(EngineDeadError) as caught:
                await work_through(fake.llm, method, ".")
            ends.append(str(caught.value))

        for method in ("sleep 1", "wake_up", "resume"):
            nursery.start_soon(wait, method)
        await wait_all_tasks_blocked()

    assert len(ends) == 3
    assert all("was left" in text for text in ends)


@pytest.mark.parametrize("strange", [[1], {"a": 1}, b"x", 2**70, "\ud800", object(), Path("/tmp")])
async def test_what_the_engine_cannot_read_is_refused_and_holds_up_no_other_call(strange: Any) -> None:
    async with open_fake_llm() as fake:
        llm = fake.llm
        calls: list[Callable[[], Awaitable[None]]] = [
            lambda: llm.sleep(strange),
            lambda: llm.wake_up([strange]),
            lambda: llm.pause_generation(mode=strange),
            lambda: llm.update_weights(strange, version="v2"),
            lambda: llm.update_weights("/tmp", version=strange),
        ]
        for call in calls:
            with trio.fail_after(BOUND_S), pytest.raises(InvalidRequestError):
                await call()

        assert not await llm.is_sleeping()
        await llm.sleep()
        await llm.wake_up()
