"""Admission: what is refused, what is counted, and that a refusal leaves nothing behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.asking import ask
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import open_fake_llm
from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    OverloadedError,
    QueuedTokensError,
    QueueFullError,
)
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits, find_overload
from trio_llm.sampling import SamplingParams

HELLO = list(b"hello")
LONG = SamplingParams(max_tokens=1000)
SHORT = SamplingParams(max_tokens=3)


async def read(llm: AsyncLLM, prompt: list[int] = HELLO, params: SamplingParams = SHORT) -> int:
    """The number of outputs of a whole answer."""
    return len(await ask(llm, prompt, params))


# ------------------------------------------------------------------------------------- the decision


def test_without_limits_nothing_is_refused() -> None:
    assert find_overload(AdmissionLimits(), num_requests=10**9, num_tokens=10**12, count=128) is None


@pytest.mark.parametrize(
    ("num_requests", "count", "is_refused"), [(3, 1, False), (4, 1, True), (2, 2, False), (3, 2, True)]
)
def test_each_choice_counts_and_the_limit_itself_is_still_admitted(
    num_requests: int, count: int, is_refused: bool
) -> None:
    limits = AdmissionLimits(max_num_queued_reqs=4)

    overload = find_overload(limits, num_requests=num_requests, num_tokens=0, count=count)

    assert isinstance(overload, QueueFullError) == is_refused


def test_the_text_names_the_limit_the_number_there_is_and_the_flag() -> None:
    requests = find_overload(AdmissionLimits(max_num_queued_reqs=17), num_requests=17, num_tokens=0)
    tokens = find_overload(
        AdmissionLimits(max_num_queued_tokens=5000), num_requests=1, num_tokens=4321, num_prompt_tokens=987
    )

    assert all(part in str(requests) for part in ("17 requests", "is 17", "--max-num-queued-reqs"))
    assert all(part in str(tokens) for part in ("4321", "5000", "987", "--max-num-queued-tokens"))


def test_more_choices_than_could_ever_be_admitted_are_the_requests_own_fault() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        find_overload(AdmissionLimits(max_num_queued_reqs=4), num_requests=0, num_tokens=0, count=5)

    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_tokens", "is_refused"),
    [(0, 1000, False), (50, 50, False), (50, 51, True), (99, 0, False), (100, 0, True)],
)
def test_prompt_tokens_are_admitted_up_to_the_limit_and_beyond_it_if_none_waits(
    num_tokens: int, num_prompt_tokens: int, is_refused: bool
) -> None:
    limits = AdmissionLimits(max_num_queued_tokens=100)

    overload = find_overload(limits, num_requests=1, num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens)

    assert isinstance(overload, QueuedTokensError) == is_refused


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["add", "token", "remove"]), st.integers(0, 5), st.integers(1, 100))))
def test_the_ledger_is_the_sum_of_what_is_in_it(events: list[tuple[str, int, int]]) -> None:
    ledger = AdmissionLedger(AdmissionLimits())
    expected: dict[int, int] = {}
    for what, request, size in events:
        if what == "add":
            ledger.add(request, size)
            expected[request] = size
        elif what == "token":
            ledger.prefill_done(request)
            if request in expected:
                expected[request] = 0
        else:
            ledger.remove(request)
            expected.pop(request, None)
        assert (ledger.num_requests, ledger.num_tokens) == (len(expected), sum(expected.values()))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "input", "token", "remove"]), st.integers(0, 5), st.integers(1, 100)))
)
def test_inputs_are_admitted_in_their_order_within_the_limit_and_all_of_them_in_the_end(
    events: list[tuple[str, int, int]],
) -> None:
    limit = 100
    ledger = AdmissionLedger(AdmissionLimits(max_num_queued_tokens=limit))
    admitted: dict[int, int] = {}
    waiting: dict[int, int] = {}

    def enter(request: int) -> None:
        assert request == next(iter(waiting)), "another one came before it"
        size = waiting.pop(request)
        assert sum(admitted.values()) == 0 or sum(admitted.values()) + size <= limit
        admitted[request] = size

    for what, request, size in events:
        if what == "add":
            if request in admitted or request in waiting:
                continue
            admitted[request] = size
            ledger.add(request, size)
        elif what == "input":
            waiting.pop(request, None)
            waiting[request] = size
            admitted.pop(request, None)
            ledger.queue_input(request, size, lambda request=request: enter(request))  # type: ignore[misc]
        elif what == "token":
            if request in admitted:
                admitted[request] = 0
            ledger.prefill_done(request)
        else:
            admitted.pop(request, None)
            waiting.pop(request, None)
            ledger.remove(request)
        assert ledger.num_tokens == sum(admitted.values()) + sum(waiting.values())
        assert ledger.num_requests == len(admitted) + len(waiting)
        assert not waiting or sum(admitted.values()) > 0, "they wait for nothing"

    while admitted or waiting:
        request = next(iter(admitted))
        del admitted[request]
        ledger.remove(request)
    assert ledger.num_tokens == ledger.num_requests == 0


# --------------------------------------------------------------------------------------- the engine


async def test_a_refusal_registers_nothing_is_counted_and_the_same_request_works_later() -> None:
    refusals = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[refusals], engine={"max_num_queued_reqs": 1}) as fake:
        async with fake.llm.generate(HELLO, LONG) as stream:
            await anext(stream)
            before = len(fake.llm._registry)
            with pytest.raises(QueueFullError) as caught:
                await read(fake.llm)

            assert len(fake.llm._registry) == before
            assert caught.value.can_retry
            assert caught.value.retry_after_s
        await fake.llm.wait_idle()

        assert await read(fake.llm) > 0
        assert refusals.rejections == ["max_num_queued_reqs"]
        await fake.assert_nothing_is_left()


async def test_a_question_before_the_costly_part_is_refused_at_once() -> None:
    refusals = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[refusals], engine={"max_num_queued_reqs": 1}) as fake:
        fake.llm.check_admission()
        async with fake.llm.generate(HELLO, LONG):
            with pytest.raises(QueueFullError):
                fake.llm.check_admission()
            assert fake.llm.is_running
        assert refusals.rejections == ["max_num_queued_reqs"]


async def test_nothing_is_rendered_for_a_request_that_is_refused_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Renderer, *args: object, **options: object) -> list[int]:
        raise AssertionError("it was rendered")

    async with open_fake_llm(engine={"max_num_queued_reqs": 1}) as fake:
        async with fake.llm.generate(HELLO, LONG):
            monkeypatch.setattr(Renderer, "render_prompt", fail)
            monkeypatch.setattr(Renderer, "render_bad_words", fail)
            for prompt, params in (("Hello", SHORT), (HELLO, SamplingParams(bad_words=("x",)))):
                with pytest.raises(QueueFullError):
                    async with fake.llm.generate(prompt, params):
                        pass
        await fake.assert_nothing_is_left()


async def test_the_load_is_asked_for_once_for_token_ids_and_once_more_before_text_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fake_llm() as fake:
        num_asked, check = 0, AdmissionLedger.check

        def count(ledger: AdmissionLedger, **fields: int) -> None:
            nonlocal num_asked
            num_asked += 1
            check(ledger, **fields)

        monkeypatch.setattr(AdmissionLedger, "check", count)
        asked = []
        for prompt in (HELLO, "Hello"):
            num_asked = 0
            async with fake.llm.generate(prompt, SHORT):
                asked.append(num_asked)

        assert asked == [1, 2]


async def test_ids_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Renderer, prompt: str | list[int], *args: object, **options: object) -> list[int]:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(Renderer, "render_prompt", fail)
    async with open_fake_llm() as fake:
        assert await read(fake.llm) > 0


async def test_a_request_whose_engine_died_while_its_text_was_rendered_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fake_llm() as fake:

        async def render_late(self: Renderer, prompt: str | list[int], *args: object, **options: object) -> list[int]:
            fake.llm.kill()
            await fake.llm.wait_dead()
            return HELLO

        monkeypatch.setattr(Renderer, "render_prompt", render_late)
        with pytest.raises(EngineDeadError):
            async with fake.llm.generate("Hello", SHORT):
                pass
        await fake.llm.wait_idle()


async def test_a_request_whose_reader_has_left_counts_until_the_engine_has_confirmed_it() -> None:
    async with open_fake_llm(engine={"max_num_queued_reqs": 1}) as fake:
        async with fake.llm.generate(HELLO, LONG) as stream:
            await anext(stream)
            fake.core.pause()
        with pytest.raises(QueueFullError):
            await read(fake.llm)
        fake.core.resume()
        await fake.llm.wait_idle()

        assert await read(fake.llm) > 0


async def test_each_sampled_choice_counts() -> None:
    async with open_fake_llm(engine={"max_num_queued_reqs": 4}) as fake:
        async with fake.llm.generate(HELLO, SamplingParams(max_tokens=1000, n=3, temperature=1)):
            with pytest.raises(QueueFullError):
                await read(fake.llm, params=SamplingParams(max_tokens=3, n=2, temperature=1))
            assert await read(fake.llm) > 0
        await fake.assert_nothing_is_left()


async def test_the_limit_of_tokens_counts_only_prompts_whose_first_token_has_not_come() -> None:
    refusals = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[refusals], engine={"max_num_queued_tokens": 100, "max_num_seqs": 1}) as fake:
        async with fake.llm.generate([1] * 90, LONG) as running:
            await anext(running)  # its prompt counts no more
            async with fake.llm.generate([2] * 90, LONG):  # waits for the first one to end
                with pytest.raises(QueuedTokensError):
                    await read(fake.llm, [3] * 11)
                async with fake.llm.generate([3] * 10, LONG):
                    pass
        await fake.assert_nothing_is_left()

        assert refusals.rejections == ["max_num_queued_tokens"]


async def test_requests_that_come_together_never_exceed_the_limit(autojump_clock: MockClock) -> None:
    limit, most = 5, 0
    async with open_fake_llm(step_s=0.1, engine={"max_num_queued_reqs": limit}) as fake:
        ends: list[str] = []

        async def run(prompt: str) -> None:
            nonlocal most
            try:
                async with fake.llm.generate(prompt, SHORT) as stream:
                    most = max(most, len(fake.llm._registry))
                    async for _ in stream:
                        pass
                ends.append("answered")
            except QueueFullError:
                ends.append("refused")

        async with trio.open_nursery() as nursery:
            for number in range(30):
                # Some prompts are long enough to become tokens in a worker thread, between the two looks at the limit.
                nursery.start_soon(run, "hello " * (1 + 100 * (number % 2)))

        assert most == limit
        assert ends.count("answered") == limit
        assert len(ends) == 30
        await fake.assert_nothing_is_left()


async def test_counts_are_zero_after_the_death_of_the_engine(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1, engine={"max_num_queued_reqs": 3, "max_num_seqs": 1}) as fake:
        ends: list[type[Exception]] = []

        async def run() -> None:
            try:
                await read(fake.llm, params=LONG)
            except (EngineDeadError, OverloadedError) as error:
                ends.append(type(error))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(run)
            await wait_all_tasks_blocked()
            fake.core.kill("lost")

        assert ends == [EngineDeadError] * 3
        assert (fake.llm._registry._ledger.num_requests, fake.llm._registry._ledger.num_tokens) == (0, 0)
        with pytest.raises(EngineDeadError):
            await read(fake.llm)


async def generate_to_the_end(llm: AsyncLLM) -> None:
    await read(llm)


async def leave_early(llm: AsyncLLM) -> None:
    async with llm.generate("hello " * 50, LONG) as stream:
        await anext(stream)


async def several_choices(llm: AsyncLLM) -> None:
    await read(llm, params=SamplingParams(max_tokens=3, n=2, temperature=1))


async def fail(llm: AsyncLLM) -> None:
    with pytest.raises(EngineGenerateError):
        await read(llm, [7])


async def be_refused(llm: AsyncLLM) -> None:
    async with llm.generate(HELLO, LONG), llm.generate(HELLO, LONG):
        with pytest.raises(QueueFullError):
            await read(llm)


@pytest.mark.parametrize("work", [generate_to_the_end, leave_early, several_choices, fail, be_refused])
async def test_cancelling_at_every_checkpoint_brings_the_counts_back_to_zero(
    work: Callable[[AsyncLLM], Awaitable[None]],
) -> None:
    limits = {"max_num_queued_reqs": 2, "max_num_queued_tokens": 10_000}
    async with open_fake_llm(failing_row_prompt=7, engine=limits) as fake:

        async def check() -> None:
            await fake.assert_nothing_is_left()

        assert await cancel_at_every_checkpoint(lambda: work(fake.llm), check) >= 3
