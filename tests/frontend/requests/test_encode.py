"""encode: one vector for one prompt, by the rules of admission, deadlines, aborts and deaths that all requests have."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.asking import ask
from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_llm import FakeSetUp, open_fake_llm
from trio_llm.errors import (
    EngineDeadError,
    EngineGenerateError,
    EngineUnavailableError,
    InvalidRequestError,
    NotSupportedError,
    PromptTooLongError,
    QueuedTokensError,
    QueueFullError,
)
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.pooling import cosine
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.run_in_order import run_in_order
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.outputs import PoolingOutput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.testing.fake_llm import FakeLLM
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

HELLO = list(b"hello")
MEAN = PoolingParams(pooling="mean")
CLASSIFY = PoolingParams(task="classify")
STEP_S = 0.1


async def answer(llm: AsyncLLM, max_tokens: int = 3) -> None:
    await ask(llm, HELLO, SamplingParams(max_tokens=max_tokens))


# ------------------------------------------------------------------------------------------ the vector


async def test_a_vector_is_that_of_its_prompt_however_it_is_given_and_has_length_1() -> None:
    async with open_fake_llm(embedding_size=7) as fake:
        by_text = await fake.llm.encode("hello", request_id="mine")
        by_ids = await fake.llm.encode(HELLO)
        other = await fake.llm.encode("hello!")
        mean = await fake.llm.encode("hello", MEAN)

        assert isinstance(by_text, PoolingOutput)
        assert (by_text.request_id, by_text.num_prompt_tokens, by_text.num_cached_tokens) == ("mine", 5, 0)
        assert by_text.data == by_ids.data
        assert len({by_text.data, other.data, mean.data}) == 3
        assert len(by_text.values) == 7
        assert math.hypot(*by_text.values) == pytest.approx(1)
        await fake.assert_nothing_is_left()


async def test_a_classifier_gives_probabilities_and_embeddings() -> None:
    async with open_fake_llm(num_labels=4) as fake:
        classes = (await fake.llm.encode("hello", CLASSIFY)).values

        assert len(classes) == 4
        assert all(0 < probability < 1 for probability in classes)
        assert sum(classes) == pytest.approx(1)
        assert math.hypot(*(await fake.llm.encode("hello")).values) == pytest.approx(1)
        assert fake.llm.get_supported_tasks() == ("embed", "classify")


async def test_long_prompts_in_a_full_engine_give_what_they_give_alone() -> None:
    prompts = [[i] * (40 + i) for i in range(12)]
    async with open_fake_llm(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=16, max_model_len=512) as fake:
        alone = [await fake.llm.encode(prompt, MEAN) for prompt in prompts]
        together: list[PoolingOutput] = []

        async def encode_all() -> None:
            together.extend(await run_in_order(lambda prompt: fake.llm.encode(prompt, MEAN), prompts))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(encode_all)
            nursery.start_soon(answer, fake.llm, 40)

        assert [output.data for output in together] == [output.data for output in alone]
        await fake.assert_nothing_is_left()


async def test_the_fake_remembers_what_was_pooled() -> None:
    async with open_fake_llm() as fake:
        await fake.llm.encode("hello", MEAN, request_id="mine")
        await answer(fake.llm)

        pooled, generated = fake.llm.requests
        assert (pooled.request_id, pooled.prompt, pooled.pooling) == ("mine", "hello", MEAN)
        assert generated.pooling is None


# ---------------------------------------------------------------------------------------- the library


async def test_embed_gives_numbers_and_takes_fields() -> None:
    async with open_fake_llm() as fake:
        assert await fake.llm.embed("hello") == (await fake.llm.encode("hello")).values
        assert await fake.llm.embed("hello", pooling="mean") == (await fake.llm.encode("hello", MEAN)).values
        plain = await fake.llm.embed(HELLO, MEAN, normalize=False)

        assert math.hypot(*plain) != pytest.approx(1)
        with pytest.raises(TypeError):
            await fake.llm.embed("hello", no_such_field=1)
        with pytest.raises(InvalidRequestError):
            await fake.llm.embed("hello", pooling="first")


async def test_a_score_is_the_cosine_of_two_embeddings() -> None:
    async with open_fake_llm() as fake:
        first, second = await fake.llm.embed("one"), await fake.llm.embed("two")

        assert await fake.llm.score("one", "two") == pytest.approx(
            sum(a * b for a, b in zip(first, second, strict=True))
        )
        assert await fake.llm.score("one", "one") == pytest.approx(1)
        assert await fake.llm.score("one", "two", pooling="mean") != await fake.llm.score("one", "two")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([3.0, 0.0], [2.0, 0.0], 1), ([1.0, 0.0], [-5.0, 0.0], -1), ([1.0, 0.0], [0.0, 9.0], 0), ([0.0], [1.0], 0)],
)
def test_the_cosine_does_not_depend_on_lengths(first: list[float], second: list[float], expected: float) -> None:
    assert cosine(first, second) == pytest.approx(expected)


async def test_results_come_in_the_order_of_what_they_are_of_and_one_failure_ends_all() -> None:
    gates = [trio.Event() for _ in range(3)]
    was_cancelled = False

    async def work(index: int) -> int:
        await gates[index].wait()
        if index + 1 < len(gates):
            gates[index + 1].set()
        return index

    async def fail(index: int) -> int:
        nonlocal was_cancelled
        if index == 1:
            raise EngineGenerateError("one failed")
        try:
            await trio.sleep_forever()
        finally:
            was_cancelled = True

    gates[0].set()
    assert await run_in_order(work, [0, 2, 1]) == [0, 2, 1]
    assert await run_in_order(work, []) == []
    with pytest.raises(EngineGenerateError, match="one failed"):
        await run_in_order(fail, [0, 1])
    assert was_cancelled


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fake_fields", "call", "words"),
    [
        ({}, lambda llm: llm.encode("hello", CLASSIFY), "cannot classify; it can generate, embed, score"),
        ({"num_labels": 2}, answer, "cannot generate; it can embed, classify"),
        ({"num_labels": 2}, lambda llm: llm.score("a", "b"), "cannot score"),
        ({"num_labels": 2}, lambda llm: llm.complete("hello"), "cannot generate"),
    ],
)
async def test_a_task_that_the_model_has_not_is_refused_and_nothing_is_sent(
    fake_fields: dict[str, Any], call: Callable[[FakeLLM], Awaitable[object]], words: str
) -> None:
    async with open_fake_llm(**fake_fields) as fake:
        with pytest.raises(NotSupportedError, match=words):
            await call(fake.llm)

        assert fake.llm.requests == []
        await fake.assert_nothing_is_left()


async def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    async with open_fake_llm(max_model_len=50) as fake:
        assert (await fake.llm.encode([1] * 50)).num_prompt_tokens == 50
        with pytest.raises(PromptTooLongError, match="maximum context length is 50 tokens, but the prompt has 51"):
            await fake.llm.encode([1] * 51)
        with pytest.raises(PromptTooLongError):
            await fake.llm.encode("x" * 51)


@pytest.mark.parametrize("prompt", [[], "", [-1], [10**6], [1.5], [True], ["a"]])
async def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as caught:
            await fake.llm.encode(prompt)

        assert caught.value.param == "prompt"
        assert fake.llm.requests == []


async def test_before_the_model_is_loaded_and_after_the_engines_death_there_is_nothing_to_encode_with() -> None:
    async with open_fake_llm(wait_until_ready=False) as fake:
        with pytest.raises(EngineUnavailableError, match="loading"):
            await fake.llm.encode("hello")
        await fake.llm.wait_until_ready()
        fake.llm.kill("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await fake.llm.encode("hello")
        with pytest.raises(EngineDeadError, match="gone"):
            await fake.llm.encode("hello")


async def test_vectors_count_in_admission_until_they_are_there() -> None:
    async with open_fake_llm(max_num_queued_reqs=2, max_num_queued_tokens=20) as fake:
        fake.llm.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.llm.encode, HELLO)
            await wait_all_tasks_blocked()
            assert (fake.llm._registry._ledger.num_requests, fake.llm._registry._ledger.num_tokens) == (1, 5)
            with pytest.raises(QueuedTokensError):
                await fake.llm.encode([1] * 16)
            nursery.start_soon(fake.llm.encode, HELLO)
            await wait_all_tasks_blocked()
            with pytest.raises(QueueFullError):
                await fake.llm.encode([1])
            with pytest.raises(QueueFullError):
                await answer(fake.llm)
            fake.llm.resume()

        assert (await fake.llm.encode(HELLO)).values
        await fake.assert_nothing_is_left()


# ------------------------------------------------------------------------------------- deadlines, aborts


async def test_what_is_past_its_deadline_while_it_waits_is_never_computed(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=STEP_S, engine={"max_num_seqs": 1}) as fake, trio.open_nursery() as nursery:
        computed: set[str] = set()
        launch = fake.llm._executor.launch

        def note(plan: Any) -> Any:
            computed.update(chunk.sequence.request_id.rpartition("-")[0] for chunk in plan.chunks)
            return launch(plan)

        fake.llm._executor.launch = note  # type: ignore[method-assign]
        nursery.start_soon(answer, fake.llm, 100)
        await wait_all_tasks_blocked()
        with trio.move_on_after(2) as scope:
            await fake.llm.encode(HELLO, request_id="hurried")
        assert scope.cancelled_caught
        with trio.fail_after(100):
            await fake.llm.encode(HELLO, request_id="patient")

        assert "patient" in computed
        assert "hurried" not in computed
        assert fake.llm.requests[1].was_aborted


async def test_a_deadline_that_was_moved_costs_the_vector_nothing_but_its_turn(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=STEP_S, engine={"max_num_seqs": 1}) as fake, trio.open_nursery() as nursery:
        expected = (await fake.llm.encode(HELLO)).data
        nursery.start_soon(answer, fake.llm, 100)
        await wait_all_tasks_blocked()
        sent: list[float | None] = []
        fake.core.on_sent = lambda message: (
            sent.append(message.deadline_s) if isinstance(message, EngineCoreRequest) else None
        )
        with trio.CancelScope(deadline=trio.current_time() + 2) as scope:

            async def move() -> None:
                await trio.sleep(1)
                scope.deadline = trio.current_time() + 100

            nursery.start_soon(move)
            assert (await fake.llm.encode(HELLO)).data == expected

        assert len(sent) == 2, "dropped once, and sent again"


async def test_an_abort_by_id_is_an_error_of_its_reader_alone() -> None:
    async with open_fake_llm() as fake:
        fake.llm.stall()
        async with trio.open_nursery() as nursery:

            async def expect_the_error() -> None:
                with pytest.raises(EngineGenerateError, match="aborted"):
                    await fake.llm.encode(HELLO, request_id="mine")

            nursery.start_soon(expect_the_error)
            nursery.start_soon(fake.llm.encode, HELLO)
            await wait_all_tasks_blocked()
            assert fake.llm.abort("mine") == 1
            fake.llm.resume()

        was_aborted = {request.request_id: request.was_aborted for request in fake.llm.requests}
        assert was_aborted.pop("mine")
        assert list(was_aborted.values()) == [False]
        await fake.assert_nothing_is_left()


async def test_an_abort_while_the_server_shuts_down_says_so() -> None:
    async with open_fake_llm() as fake, trio.open_nursery() as nursery:
        fake.llm.stall()

        async def expect_the_error() -> None:
            with pytest.raises(EngineUnavailableError, match="shutting down and has ended"):
                await fake.llm.encode(HELLO, request_id="mine")

        nursery.start_soon(expect_the_error)
        await wait_all_tasks_blocked()
        fake.llm.drain()
        fake.llm.abort("mine")
        with pytest.raises(EngineUnavailableError, match="no new requests"):
            await fake.llm.encode(HELLO)


async def test_a_reader_gets_the_engines_death() -> None:
    async with open_fake_llm() as fake, trio.open_nursery() as nursery:
        fake.llm.stall()

        async def expect_the_error() -> None:
            with pytest.raises(EngineDeadError, match="out of luck"):
                await fake.llm.encode(HELLO)

        nursery.start_soon(expect_the_error)
        await wait_all_tasks_blocked()
        fake.llm.kill("out of luck")


@pytest.mark.parametrize("fault", ["row", "token"])
async def test_a_row_that_fails_is_the_error_of_its_request_alone(fault: str) -> None:
    async with open_fake_llm() as fake:
        if fault == "row":
            fake.llm.fail_next_row("no luck")
        else:
            fake.llm.faulty_token()
        with pytest.raises(EngineGenerateError, match="no luck" if fault == "row" else "no numbers"):
            await fake.llm.encode(HELLO)

        assert (await fake.llm.encode(HELLO)).values
        await fake.assert_nothing_is_left()


@pytest.mark.parametrize("pooled", [None, b"", b"abc"])
async def test_an_end_without_a_whole_vector_is_the_error_of_its_request(pooled: bytes | None) -> None:
    async with open_fake_llm() as fake, trio.open_nursery() as nursery:
        fake.llm.stall()

        async def expect_the_error() -> None:
            with pytest.raises(EngineGenerateError, match="without a vector"):
                await fake.llm.encode(HELLO)

        nursery.start_soon(expect_the_error)
        await wait_all_tasks_blocked()
        (internal_id,) = fake.llm._requests
        row = EngineCoreOutput(internal_id, 0, [], finish_reason="stop", pooled=pooled)
        fake.core.inject(EngineCoreOutputs(1, 1, 0.0, [row]))


# ------------------------------------------------------------------------------------------ statistics


async def test_every_request_that_came_is_counted_once_by_its_end() -> None:
    metrics = PrometheusStatLogger("m")
    async with open_fake_llm(stat_loggers=[metrics], failing_row_prompt=7) as fake:
        for _ in range(3):
            await fake.llm.encode(HELLO)
        with pytest.raises(EngineGenerateError):
            await fake.llm.encode([7, 7])
        fake.llm.stall()
        with trio.CancelScope() as scope:
            scope.cancel()
            await fake.llm.encode(HELLO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.llm.encode, HELLO)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        fake.llm.resume()
        await fake.assert_nothing_is_left()

        statistics = fake.llm.statistics()
        assert dict(statistics.num_finished) == {"stop": 3, "length": 0, "abort": 1, "error": 1}
        assert (statistics.num_prompt_tokens, statistics.num_generation_tokens) == (15, 0)
    text = metrics.render()[0].decode()
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 15.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 5.0' in text


# ----------------------------------------------------------------------------------------- cancellation


async def encode(llm: AsyncLLM) -> None:
    await llm.encode("hello")


async def encode_a_big_prompt(llm: AsyncLLM) -> None:
    # Long enough to become tokens in a worker thread.
    await llm.encode("hello " * 900, MEAN)


async def embed(llm: AsyncLLM) -> None:
    await llm.embed("hello")


async def score(llm: AsyncLLM) -> None:
    await llm.score("hello", "there")


async def many(llm: AsyncLLM) -> None:
    await run_in_order(llm.encode, ["a", "b", "c"])


async def fail(llm: AsyncLLM) -> None:
    with pytest.raises(EngineGenerateError):
        await llm.encode([7])


async def beside_an_answer(llm: AsyncLLM) -> None:
    async with llm.generate(HELLO, SamplingParams(max_tokens=50)) as stream:
        await anext(stream)
        await llm.encode("hello")
        await anext(stream)


async def check_the_next_request(fake: FakeSetUp) -> None:
    await fake.assert_nothing_is_left()
    assert (await fake.llm.encode("hello")).values
    await fake.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("work", "least"),
    [(encode, 4), (encode_a_big_prompt, 3), (embed, 4), (score, 2), (many, 2), (fail, 3), (beside_an_answer, 6)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_cancelling_at_every_checkpoint_leaves_nothing_behind(
    work: Callable[[AsyncLLM], Awaitable[None]], least: int
) -> None:
    async with open_fake_llm(failing_row_prompt=7, num_blocks=200, max_model_len=6000) as fake:
        num_checkpoints = await cancel_at_every_checkpoint(lambda: work(fake.llm), lambda: check_the_next_request(fake))

        assert num_checkpoints >= least, "so few checkpoints that the work was hardly interrupted anywhere"


@pytest.mark.parametrize("unfit", [SamplingParams(), {}, "embed", 1])
async def test_an_embedding_takes_the_parameters_of_one(unfit: Any) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError, match="PoolingParams"):
            await fake.llm.encode("Hello", unfit)
        assert not fake.llm.requests


@pytest.mark.parametrize("unfit", [PoolingParams(), {}, "x", 0])
async def test_an_answer_takes_the_parameters_of_one(unfit: Any) -> None:
    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("Hello")

    async with open_fake_llm() as fake:
        for prompt in ("Hello", inputs()):
            with pytest.raises(InvalidRequestError, match="SamplingParams"):
                async with fake.llm.generate(prompt, unfit):
                    pytest.fail("it was admitted")
        assert not len(fake.llm._registry)
