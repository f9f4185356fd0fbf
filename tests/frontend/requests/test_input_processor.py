"""InputProcessor: what the caller leaves open is filled in; what does not fit the model is refused.

Refusals of prompts are tested through `generate()`: tests/frontend/test_async_llm.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.frontend.requests.input_processor import InputProcessor, make_internal_id
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import Continue, ModelConfig

MODEL = ModelConfig(
    model_dir="/m",
    max_model_len=100,
    logits_width=50,
    num_blocks=10,
    block_size=32,
    dtype="float32",
    device="cpu",
    eos_token_ids=(2,),
    tasks=("generate",),
    versions={},
)


def test_max_tokens_left_open_is_the_rest_of_the_context() -> None:
    request = InputProcessor(MODEL).process([1] * 30, SamplingParams(), request_id="r")

    assert request.params.max_tokens == 70


def test_prompt_and_answer_may_fill_the_context_and_no_more() -> None:
    processor = InputProcessor(MODEL)

    assert processor.process([1] * 30, SamplingParams(max_tokens=70), request_id="r").params.max_tokens == 70
    with pytest.raises(PromptTooLongError, match=r"maximum context length is 100 .* 30 and max_tokens is 71"):
        processor.process([1] * 30, SamplingParams(max_tokens=71), request_id="r")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "has no tokens"),
        (None, "must be text or a list of token ids, not of type NoneType"),
        (b"Once", "must be text or a list of token ids, not of type bytes"),
        (["Once", "Twice"], "one of token ids, which are integers"),
    ],
)
def test_a_prompt_of_another_type_is_not_called_an_empty_one(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        InputProcessor(MODEL).process(prompt, SamplingParams(), request_id="r")

    assert refused.value.param == "prompt"


def test_min_tokens_over_the_rest_of_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        InputProcessor(MODEL).process([1] * 30, SamplingParams(min_tokens=71), request_id="r")

    assert refused.value.param == "min_tokens"


def test_a_later_input_of_a_session_is_weighed_with_what_came_before_and_tells_only_what_is_new() -> None:
    def process(token_ids: list[int], params: SamplingParams) -> Continue:
        return InputProcessor(MODEL).process_input(
            token_ids, params, request_id="r", num_earlier_tokens=30, bad_words_token_ids=[[3]]
        )

    message = process([1, 2], SamplingParams())
    assert (message.token_ids, message.params.max_tokens, message.bad_words_token_ids) == ([1, 2], 68, [[3]])
    assert message.params.seed is not None
    with pytest.raises(PromptTooLongError, match="prompt has 32 and max_tokens is 69"):
        process([1, 2], SamplingParams(max_tokens=69))
    with pytest.raises(PromptTooLongError, match="prompt has 100;"):
        process([1] * 70, SamplingParams())
    with pytest.raises(InvalidRequestError, match="from 0 to 49"):
        process([50], SamplingParams())


def test_a_seed_that_is_given_is_kept_and_others_differ() -> None:
    processor = InputProcessor(MODEL)

    assert processor.process([1], SamplingParams(seed=-7), request_id="r").params.seed == -7
    seeds = {processor.process([1], SamplingParams(), request_id="r").params.seed for _ in range(20)}
    assert len(seeds) == 20


def test_internal_ids_of_one_caller_id_differ() -> None:
    ids = {make_internal_id("same") for _ in range(100)}

    assert len(ids) == 100
    assert all(internal_id.startswith("same-") for internal_id in ids)


@pytest.mark.parametrize("priority", [True, "1", 1.0, 2**63])
def test_a_priority_that_is_no_64_bit_integer_is_refused(priority: int) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        InputProcessor(MODEL).process([1], SamplingParams(), request_id="r", priority=priority)

    assert refused.value.param == "priority"


def test_a_bad_word_with_a_token_that_the_model_cannot_emit_is_refused() -> None:
    processor = InputProcessor(MODEL)

    with pytest.raises(InvalidRequestError) as refused:
        processor.process([1], SamplingParams(bad_words=("x",)), request_id="r", bad_words_token_ids=[[3], [4, 50]])

    assert refused.value.param == "bad_words"
    request = processor.process([1], SamplingParams(), request_id="r", bad_words_token_ids=[[3], [4, 49]])
    assert request.bad_words_token_ids == [[3], [4, 49]]


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused() -> None:
    processor = InputProcessor(MODEL)

    with pytest.raises(InvalidRequestError, match="50, but the model's ids end at 49") as refused:
        processor.process([1], SamplingParams(logit_bias={49: 1.0, 50: 1.0}), request_id="r")

    assert refused.value.param == "logit_bias"
    assert processor.process([1], SamplingParams(logit_bias={49: 1.0}), request_id="r").params.logit_bias == {49: 1.0}
