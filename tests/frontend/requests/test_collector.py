"""The collector: what is put is taken once, in order, however put and take interleave."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trio_llm.errors import EngineDeadError
from trio_llm.frontend.requests.collector import RepeatingCollector, RequestOutputCollector
from trio_llm.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from trio_llm.sampling import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def an_output(text: str, *token_ids: int, index: int = 0, finish: FinishReason | None = None) -> RequestOutput:
    logprobs = [TokenLogprobs(Logprob(t, -1.0, 1, "", b""), ()) for t in token_ids]
    choice = CompletionOutput(index, text, list(token_ids), logprobs, finish)
    return RequestOutput("r", 3, 0, [choice], finish is not None)


async def test_unread_deltas_become_one_that_says_the_same() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(an_output("a", 1))
    collector.put(an_output("b", 2, 3))
    collector.put(an_output("c", 4, finish="length"))

    output = await collector.receive()

    (choice,) = output.outputs
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("abc", [1, 2, 3, 4], "length")
    assert [entry.sampled.token_id for entry in choice.logprobs or []] == [1, 2, 3, 4]
    assert output.finished


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_merged_outputs_carry_the_version_of_the_newest(kind: RequestOutputKind) -> None:
    collector = RequestOutputCollector(kind)
    for version in ("v1", "v2"):
        output = an_output("a", 1)
        output.weight_version = version
        collector.put(output)

    assert (await collector.receive()).weight_version == "v2"


async def test_choices_are_merged_each_by_itself() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(an_output("a", 1, index=0))
    collector.put(an_output("x", 7, index=1))
    collector.put(an_output("b", 2, index=0, finish="stop"))

    output = await collector.receive()

    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "ab", "stop"), (1, "x", None)]


async def test_an_unread_cumulative_output_is_replaced() -> None:
    collector = RequestOutputCollector(CUMULATIVE)
    collector.put(an_output("a", 1))
    collector.put(an_output("ab", 1, 2))

    output = await collector.receive()

    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("ab", [1, 2])


async def test_an_unread_cumulative_output_of_one_choice_outlives_news_of_another() -> None:
    collector = RequestOutputCollector(CUMULATIVE)
    for output in (
        an_output("x", 7, index=1),
        an_output("a", 1, index=0),
        an_output("xy", 7, 8, index=1, finish="stop"),
        an_output("p", 5, index=2),
        an_output("ab", 1, 2, index=0),
    ):
        collector.put(output)

    output = await collector.receive()

    seen = [(choice.index, choice.text, choice.token_ids, choice.finish_reason) for choice in output.outputs]
    assert seen == [(0, "ab", [1, 2], None), (1, "xy", [7, 8], "stop"), (2, "p", [5], None)]


async def test_a_repeating_collector_gives_the_one_choice_several_times_merged_or_not() -> None:
    collector = RepeatingCollector(DELTA, 3)
    collector.put(an_output("a", 1))
    collector.put(an_output("b", 2))
    merged = await collector.receive()
    collector.put(an_output("c", 3, finish="length"))
    last = await collector.receive()
    collector.put_error(EngineDeadError("gone"))

    assert [(choice.index, choice.text) for choice in merged.outputs] == [(i, "ab") for i in range(3)]
    assert [(choice.text, choice.finish_reason) for choice in last.outputs] == [("c", "length")] * 3
    assert (merged.finished, last.finished) == (False, True)
    with pytest.raises(EngineDeadError):
        await collector.receive()


async def test_a_waiting_reader_gets_what_is_put(autojump_clock: trio.testing.MockClock) -> None:
    collector = RequestOutputCollector(DELTA)
    taken: list[str] = []

    async def read() -> None:
        taken.append((await collector.receive()).outputs[0].text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        collector.put(an_output("a", 1))
        collector.put(an_output("b", 2))

    assert taken == ["a"]
    assert (await collector.receive()).outputs[0].text == "b"


async def test_the_reader_gets_the_text_it_is_owed_before_the_error() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(an_output("a", 1))
    collector.put_error(EngineDeadError("gone"))
    collector.put_error(EngineDeadError("a later reason"))
    collector.put(an_output("too late", 2))

    assert (await collector.receive()).outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await collector.receive()


async def test_a_reader_that_waits_gets_the_error() -> None:
    collector = RequestOutputCollector(DELTA)

    with pytest.RaisesGroup(EngineDeadError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collector.receive)
            await wait_all_tasks_blocked()
            collector.put_error(EngineDeadError("gone"))


async def test_putting_to_a_reader_that_left_does_nothing() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(an_output("a", 1))
    collector.close()

    assert collector.put(an_output("b", 2)) == 0
    collector.put_error(EngineDeadError("gone"))
    collector.close()
    with pytest.raises(trio.ClosedResourceError):
        await collector.receive()


async def test_a_cancelled_reader_has_taken_nothing() -> None:
    collector = RequestOutputCollector(DELTA)
    collector.put(an_output("a", 1))

    with trio.CancelScope() as scope:
        scope.cancel()
        await collector.receive()

    assert scope.cancelled_caught
    assert (await collector.receive()).outputs[0].text == "a"


async def test_a_reader_cancelled_while_a_put_wakes_it_loses_nothing() -> None:
    collector = RequestOutputCollector(DELTA)
    taken: list[str] = []
    scope = trio.CancelScope()

    async def read() -> None:
        with scope:
            taken.append((await collector.receive()).outputs[0].text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        collector.put(an_output("a", 1))
        scope.cancel()  # after the put has chosen the reader, before the reader runs

    if not taken:
        taken.append((await collector.receive()).outputs[0].text)
    assert taken == ["a"]


async def test_what_is_unread_is_measured_until_it_is_taken() -> None:
    collector = RequestOutputCollector(DELTA)
    assert collector.put(an_output("a" * 100, 1)) == 0
    two = collector.put(an_output("a" * 100, 1))
    assert collector.put(an_output("a" * 100, 1)) == two * 3 // 2 > 300

    await collector.receive()

    collector.put(an_output("a" * 100, 1))
    assert collector.put(an_output("a" * 100, 1)) == two


@given(takes=st.lists(st.booleans(), min_size=1, max_size=40))
def test_any_interleaving_of_put_and_take_gives_the_same_text(takes: list[bool]) -> None:
    async def main() -> str:
        collector = RequestOutputCollector(DELTA)
        text = ""
        unread = False
        for count, takes_now in enumerate(takes):
            collector.put(an_output(f"{count},", count))
            unread = True
            if takes_now:
                text += (await collector.receive()).outputs[0].text
                unread = False
        return text + ((await collector.receive()).outputs[0].text if unread else "")

    assert trio.run(main) == "".join(f"{count}," for count in range(len(takes)))


@given(st.lists(st.sampled_from(["put", "read", "cancel", "settle"]), max_size=40))
def test_parked_and_cancelled_readers_lose_and_double_nothing_and_the_error_comes_last(steps: list[str]) -> None:
    async def main() -> tuple[list[str], int]:
        collector = RequestOutputCollector(DELTA)
        taken: list[str] = []
        scopes: list[trio.CancelScope] = []  # of the one reader, while there is one
        num_put = 0

        async def read_once() -> None:
            try:
                with scopes[0]:
                    taken.append((await collector.receive()).outputs[0].text)
            except EngineDeadError:
                taken.append("error")
            finally:
                scopes.clear()

        async with trio.open_nursery() as nursery:
            for step in steps:
                if step == "put":
                    collector.put(an_output(f"{num_put},", num_put))
                    num_put += 1
                elif step == "read" and not scopes:
                    scopes.append(trio.CancelScope())
                    nursery.start_soon(read_once)
                elif step == "cancel" and scopes:
                    scopes[0].cancel()
                elif step == "settle":
                    await wait_all_tasks_blocked()
            collector.put_error(EngineDeadError("gone"))
        while "error" not in taken:
            scopes.append(trio.CancelScope())
            await read_once()
        return taken, num_put

    taken, num_put = trio.run(main)

    assert taken[-1] == "error"
    assert "".join(taken[:-1]) == "".join(f"{number}," for number in range(num_put))
