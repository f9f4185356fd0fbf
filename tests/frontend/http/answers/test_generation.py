"""Generation: several prompts of one HTTP request run side by side, and end together however the block is left."""

from __future__ import annotations

import pytest
import trio

from tests.support.cancelling import cancel_at_every_checkpoint
from tests.support.fake_client import HANG, End, FakeClient, Step
from trio_llm.errors import EngineGenerateError, InvalidRequestError
from trio_llm.frontend.http.answers.generation import Generation, IndexedOutput, RunningRequests
from trio_llm.frontend.http.server.errors import only_error
from trio_llm.frontend.http.server.timeouts import NO_TIMEOUT, RequestTimeout, timeout_of
from trio_llm.sampling import RequestOutputKind, SamplingParams

ANSWER: tuple[Step, ...] = ("a", "b", End("c"))


def generation(client: FakeClient, *prompts: str, timeout: RequestTimeout = NO_TIMEOUT) -> Generation:
    return Generation(
        client=client,
        running=RunningRequests(),
        prompts=prompts,
        params=SamplingParams(output_kind=RequestOutputKind.DELTA),
        request_id="R",
        timeout=timeout,
    )


async def read(work: Generation) -> list[IndexedOutput]:
    async with work.open() as outputs:
        return [output async for output in outputs]


def assert_nothing_is_left(client: FakeClient, work: Generation) -> None:
    assert client.running == []
    assert all(asked.left.is_set() for asked in client.asked)
    assert work.running.ids() == []


@pytest.mark.parametrize("timeout_s", [None, 1000])
@pytest.mark.parametrize(("num_prompts", "least"), [(1, 4), (3, 9)])
async def test_cancelling_at_any_checkpoint_aborts_every_prompt(
    num_prompts: int, least: int, timeout_s: float | None
) -> None:
    client = FakeClient(*ANSWER)
    work = generation(client, *["x"] * num_prompts, timeout=timeout_of(None, timeout_s, trio.current_time()))

    async def check() -> None:
        assert_nothing_is_left(client, work)

    num_checkpoints = await cancel_at_every_checkpoint(lambda: read(work), check)

    assert num_checkpoints >= least, "so few checkpoints that the work was hardly interrupted anywhere"
    assert {index for index, output in await read(work) if output.finished} == set(range(num_prompts))


@pytest.mark.parametrize("timeout_s", [None, 1000])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_cancelling_after_some_outputs_at_any_checkpoint_aborts_every_prompt(
    num_prompts: int, timeout_s: float | None
) -> None:
    client = FakeClient("a", HANG)
    work = generation(client, *["x"] * num_prompts, timeout=timeout_of(None, timeout_s, trio.current_time()))

    async def leave_early() -> None:
        async with work.open() as outputs:
            for _ in range(num_prompts):
                await anext(outputs)

    async def check() -> None:
        assert_nothing_is_left(client, work)

    assert await cancel_at_every_checkpoint(leave_early, check) >= 2


@pytest.mark.parametrize("before", [(), ("a",)], ids=["first", "later"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_when_one_prompt_fails_the_others_are_aborted_and_its_error_comes_out(
    place: int, before: tuple[Step, ...]
) -> None:
    scripts: list[tuple[Step, ...]] = [("a", HANG)] * 3
    scripts[place] = (*before, EngineGenerateError("row failed"))
    client = FakeClient(scripts=scripts)
    work = generation(client, "x", "y", "z")

    with pytest.raises((EngineGenerateError, ExceptionGroup)) as caught:
        await read(work)

    assert str(only_error(caught.value)) == "row failed"
    assert len(client.asked) == 3
    assert_nothing_is_left(client, work)


async def test_a_prompt_that_is_refused_aborts_those_that_were_admitted() -> None:
    client = FakeClient("a", HANG)
    work = generation(client, "x", "", "z")

    with pytest.raises((InvalidRequestError, ExceptionGroup)) as caught:
        await read(work)

    error = only_error(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "prompt"
    assert_nothing_is_left(client, work)


async def test_an_error_of_the_reader_aborts_every_prompt_and_is_not_changed() -> None:
    client = FakeClient("a", HANG)
    work = generation(client, "x", "y")

    with pytest.raises((ZeroDivisionError, ExceptionGroup)) as caught:
        async with work.open() as outputs:
            await anext(outputs)
            raise ZeroDivisionError

    assert isinstance(only_error(caught.value), ZeroDivisionError)
    assert_nothing_is_left(client, work)
