"""Log-probabilities of prompts, allowed tokens and bad words, from `generate()` to the engine and back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.frontend.requests.test_output_processor import TABLE, Case
from tests.support.fake_llm import open_fake_llm
from trio_llm.errors import EngineGenerateError, InvalidRequestError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.input_processor import MAX_PROMPT_LOGPROBS
from trio_llm.frontend.requests.output.output_processor import OutputGap
from trio_llm.outputs import RequestOutput
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.testing.answers import END, LOGITS_WIDTH
from trio_llm.wire.messages import LogprobRow

PROMPT = [10, 20, 30, 40, 50]


async def outputs(llm: AsyncLLM, prompt: str | list[int], **params: Any) -> list[RequestOutput]:
    async with llm.generate(prompt, SamplingParams(**({"max_tokens": 4} | params))) as stream:
        return [output async for output in stream]


async def test_the_first_item_has_one_entry_a_prompt_token_and_none_for_the_first() -> None:
    async with open_fake_llm() as fake:
        first, *others = await outputs(fake.llm, PROMPT, prompt_logprobs=2)

    assert first.prompt_logprobs is not None
    nothing, *entries = first.prompt_logprobs
    assert nothing is None
    assert [entry.sampled.token_id for entry in entries if entry] == PROMPT[1:]
    assert [len(entry.top) for entry in entries if entry] == [2] * 4
    assert all(entry.sampled.logprob == -entry.sampled.rank * math.log(2) for entry in entries if entry)
    assert others
    assert all(output.prompt_logprobs is None for output in others)


async def test_chunks_and_preemption_do_not_change_them() -> None:
    prompt = [(7 * i) % 200 for i in range(700)]  # more than a step's budget, and several rows
    async with open_fake_llm() as fake:
        (whole,) = await outputs(fake.llm, prompt, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)

    assert whole.prompt_logprobs is not None
    assert [entry and entry.sampled.token_id for entry in whole.prompt_logprobs] == [None, *prompt[1:]]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_reader_of_everything_gets_them_with_any_kind_and_any_number_of_choices(
    kind: RequestOutputKind, n: int, temperature: float
) -> None:
    async with open_fake_llm() as fake:
        items = await outputs(
            fake.llm, PROMPT, prompt_logprobs=0, n=n, temperature=temperature, output_kind=kind, max_tokens=3
        )
        await fake.assert_nothing_is_left()

    found = [item.prompt_logprobs for item in items if item.prompt_logprobs is not None]
    assert found
    assert all([e and e.sampled.token_id for e in one] == [None, *PROMPT[1:]] for one in found)
    if kind is not RequestOutputKind.CUMULATIVE or n == 1:
        assert items[0].prompt_logprobs is not None


async def test_who_does_not_ask_gets_none() -> None:
    async with open_fake_llm() as fake:
        items = await outputs(fake.llm, PROMPT, logprobs=2)

    assert all(item.prompt_logprobs is None for item in items)


async def test_more_of_them_than_one_request_may_have_are_refused() -> None:
    async with open_fake_llm(max_model_len=16384, num_blocks=600) as fake:
        num_tokens = MAX_PROMPT_LOGPROBS // 21 + 1
        with pytest.raises(InvalidRequestError) as refused:
            await outputs(fake.llm, [5] * num_tokens, prompt_logprobs=20)

    assert refused.value.param == "prompt_logprobs"
    assert str(MAX_PROMPT_LOGPROBS) in str(refused.value)


# ------------------------------------------------------------------------------------------ the rows


def scored(token_ids: list[int]) -> list[LogprobRow]:
    return [LogprobRow([token_id], [-0.5], 1) for token_id in token_ids]


def make_case() -> Case:
    case = Case(prompt_logprobs=0)
    case.state.request.prompt_token_ids[:] = [1, 2, 3]
    case.state.num_prompt_tokens = 3
    return case


def test_rows_that_are_repeated_add_nothing() -> None:
    case = make_case()
    assert case.row([], prompt_logprobs=scored([2]), prompt_logprobs_start=1) is None
    assert case.row([], prompt_logprobs=scored([2, 3]), prompt_logprobs_start=1) is None
    case.row([104])

    assert case.last is not None
    assert case.last.prompt_logprobs is not None
    assert [e and e.sampled.token_id for e in case.last.prompt_logprobs] == [None, 2, 3]


def test_a_row_before_them_that_is_missing_is_a_gap() -> None:
    case = make_case()

    with pytest.raises(OutputGap, match="prompt tokens"):
        case.row([], prompt_logprobs=scored([3]), prompt_logprobs_start=2)


def test_a_token_before_all_of_them_is_the_error_of_its_request() -> None:
    case = make_case()
    case.row([], prompt_logprobs=scored([2]), prompt_logprobs_start=1)

    processed = case.row([104])

    assert processed is not None
    assert isinstance(processed.error, EngineGenerateError)
    assert "2 of 3 prompt tokens" in str(processed.error)


def test_an_id_that_the_model_does_not_have_is_the_error_of_its_request() -> None:
    case = make_case()

    processed = case.row([], prompt_logprobs=scored([TABLE.logits_width]), prompt_logprobs_start=1)

    assert processed is not None
    assert processed.error is not None
    assert processed.must_abort


# --------------------------------------------------------------------------- allowed tokens, bad words


async def test_only_allowed_tokens_come() -> None:
    async with open_fake_llm() as fake:
        items = await outputs(fake.llm, PROMPT, allowed_token_ids=(65, 110), max_tokens=30)

    assert {i for item in items for i in item.outputs[0].token_ids} == {65, 110}


@pytest.mark.parametrize("bad_words", [(), ("7",)])
async def test_parameters_that_leave_no_token_are_refused_at_once(
    bad_words: tuple[str, ...],
) -> None:
    async with open_fake_llm() as fake:
        (seven,) = fake.llm.renderer.tokenizer.encode("7", add_special_tokens=False)
        allowed = seven if bad_words else END
        with pytest.raises(InvalidRequestError, match="allowed_token_ids") as refused:
            await outputs(fake.llm, PROMPT, allowed_token_ids=(allowed,), min_tokens=2, bad_words=bad_words)

        assert refused.value.param == "allowed_token_ids"
        await fake.assert_nothing_is_left()


async def test_parameters_that_leave_no_token_later_end_their_request_alone() -> None:
    async with open_fake_llm() as fake:
        seven, same = fake.llm.renderer.tokenizer.encode("77", add_special_tokens=False)
        assert seven == same
        with pytest.raises(EngineGenerateError, match="allowed_token_ids"):
            await outputs(fake.llm, PROMPT, allowed_token_ids=(seven,), bad_words=("77",))

        assert await outputs(fake.llm, PROMPT)
        await fake.assert_nothing_is_left()


async def test_a_bad_word_does_not_come_with_or_without_a_space() -> None:
    async with open_fake_llm() as fake:
        encode = fake.llm.renderer.tokenizer.encode
        script = tuple(encode("ab xy abxy", add_special_tokens=False))
    async with open_fake_llm(script=script) as fake:
        free = "".join([item.outputs[0].text for item in await outputs(fake.llm, PROMPT, max_tokens=len(script))])
        items = await outputs(fake.llm, PROMPT, max_tokens=len(script), bad_words=("xy",))

    assert "xy" in free
    assert "xy" not in "".join([item.outputs[0].text for item in items])


async def test_a_bad_word_is_the_tokens_of_the_word_and_of_the_word_after_a_space() -> None:
    async with open_fake_llm() as fake:
        renderer = fake.llm.renderer
        encode = renderer.tokenizer.encode

        assert await renderer.render_bad_words(["hello", " w", " "]) == [
            encode(text, add_special_tokens=False) for text in ("hello", " hello", "w", " w", " ")
        ]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": (LOGITS_WIDTH,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 2**31 - 1)}, "allowed_token_ids"),
        ({"stop_token_ids": (LOGITS_WIDTH,)}, "stop_token_ids"),
    ],
)
async def test_an_id_beyond_the_model_s_is_refused(params: dict[str, Any], field: str) -> None:
    async with open_fake_llm() as fake:
        with pytest.raises(InvalidRequestError) as refused:
            await outputs(fake.llm, PROMPT, **params)

        assert refused.value.param == field
        assert await outputs(fake.llm, PROMPT, allowed_token_ids=(LOGITS_WIDTH - 1,))
