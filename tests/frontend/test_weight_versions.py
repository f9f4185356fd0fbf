"""`weight_versions` of a choice: which weights computed which of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.support.asking import ask, token_ids
from trio_llm.frontend.requests.output.output_processor import OutputProcessor
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.outputs import RequestOutput, WeightVersionSpan
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing import open_fake_llm
from trio_llm.testing.fake_llm import _tokenizer_and_template
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreRequest


def spans_of(versions: list[str]) -> list[WeightVersionSpan]:
    """What a list with the version of each token says, put together as simply as can be."""
    spans: list[WeightVersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = WeightVersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(WeightVersionSpan(version, index, index + 1))
    return spans


@given(
    messages=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=8),
    stops=st.booleans(),
    kind=st.sampled_from(RequestOutputKind),
)
def test_spans_follow_each_other_and_cover_all_tokens(
    messages: list[tuple[str, int]], stops: bool, kind: RequestOutputKind
) -> None:
    """`messages`: the version behind each message of the engine, and how many tokens it has for the request."""
    processor = OutputProcessor(_tokenizer_and_template()[0].table)
    params = SamplingParams(seed=1, max_tokens=99, output_kind=kind, stop=("never",) if stops else ())
    state = processor.make_state(EngineCoreRequest("r", [1], params), "r")
    state.mark_sent()
    versions: list[str] = []
    last: RequestOutput | None = None
    for number, (version, count) in enumerate(messages):
        processor.weight_version = version
        is_last = number == len(messages) - 1
        row = EngineCoreOutput("r", len(versions), [65] * count, finish_reason="length" if is_last else None)
        output = processor.process_delta(state, row)
        if output is None:
            processed = processor.process(state, row)
            assert processed is not None
            output = processed.output
        if not is_last and output is not None:
            assert output.outputs[0].weight_versions is None
        versions += [version] * count
        last = output

    assert last is not None
    assert last.outputs[0].weight_versions == spans_of(versions)


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_an_update_in_the_middle_of_an_answer_makes_two_spans(kind: RequestOutputKind, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40, seed=1, n=2, output_kind=kind)
    outputs: list[RequestOutput] = []
    async with open_fake_llm() as llm, trio.open_nursery() as nursery:

        async def read() -> None:
            outputs.extend(await ask(llm, "hello", params))

        nursery.start_soon(read)
        while not any(r.state.num_tokens > 5 for r in llm._registry.in_flight.values()):
            await trio.lowlevel.checkpoint()
        await llm.update_weights(str(tmp_path), version="v2")

    ends = [choice for output in outputs for choice in output.outputs if choice.finish_reason is not None]
    assert len(ends) == 2
    for choice in ends:
        assert choice.weight_versions is not None
        first, second = choice.weight_versions
        assert (first.version, first.start, second.version, second.end) == ("default", 0, "v2", 40)
        assert 0 < first.end == second.start < 40


async def test_an_answer_that_is_aborted_has_the_spans_of_what_it_has() -> None:
    async with open_fake_llm() as llm, llm.generate("hello", SamplingParams(max_tokens=90), request_id="r") as stream:
        outputs = [await anext(stream) for _ in range(3)]
        llm.abort("r")
        outputs += [output async for output in stream]

    num_tokens = len(token_ids(outputs))
    assert outputs[-1].outputs[0].weight_versions == [WeightVersionSpan("default", 0, num_tokens)]


async def test_spans_of_a_session_count_the_tokens_of_each_answer(tmp_path: Path) -> None:
    async with open_fake_llm() as llm:

        async def inputs() -> AsyncIterator[StreamingInput]:
            yield StreamingInput("one")
            await llm.update_weights(str(tmp_path), version="v2")
            yield StreamingInput("two")

        outputs = await ask(llm, inputs(), SamplingParams(max_tokens=4, ignore_eos=True))

    ends = [output.outputs[0].weight_versions for output in outputs if output.outputs[0].finish_reason is not None]
    one, two = [WeightVersionSpan("default", 0, 4)], [WeightVersionSpan("v2", 0, 4)]
    assert ends == [one, two, two]
