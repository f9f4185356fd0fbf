"""Log-probabilities: every token gets its own text, bytes and alternatives."""

from __future__ import annotations

import math

import pytest

from tests.support import tiny_tokenizers
from tests.support.tiny_tokenizers import byte_ids
from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.rendering.tokenizer import Tokenizer
from trio_llm.frontend.text.detokenizer import TokenIdError
from trio_llm.frontend.text.logprobs import LOGPROB_FLOOR, make_token_logprobs
from trio_llm.outputs import Logprob
from trio_llm.wire.messages import LogprobRow

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level_json(), logits_width=300)
TABLE = TOKENIZER.table


def test_the_sampled_token_and_its_alternatives_have_text_bytes_and_rank() -> None:
    [hello] = TOKENIZER.encode("hello", add_special_tokens=False)
    [end] = TOKENIZER.encode("<|end|>", add_special_tokens=False)
    [lone] = byte_ids(TOKENIZER, b"\xf0")

    entry = make_token_logprobs(LogprobRow([lone, hello, end], [-3.5, -0.25, -2.0], sampled_rank=17), TABLE)

    assert entry.sampled == Logprob(lone, -3.5, 17, "\N{REPLACEMENT CHARACTER}", b"\xf0")
    assert entry.top == (Logprob(hello, -0.25, 1, "hello", b"hello"), Logprob(end, -2.0, 2, "<|end|>", b"<|end|>"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-math.inf, LOGPROB_FLOOR), (math.nan, LOGPROB_FLOOR), (-1e30, LOGPROB_FLOOR), (1e-7, 0.0), (math.inf, 0.0)],
)
def test_numbers_that_json_or_probability_do_not_know_are_clamped(value: float, shown: float) -> None:
    entry = make_token_logprobs(LogprobRow([1, 2], [value, value], sampled_rank=1), TABLE)

    assert (entry.sampled.logprob, entry.top[0].logprob) == (shown, shown)


def test_ids_that_only_pad_the_logits_have_no_text() -> None:
    entry = make_token_logprobs(LogprobRow([299], [-1.0], sampled_rank=1), TABLE)

    assert (entry.sampled.token, entry.sampled.token_bytes, entry.top) == ("", b"", ())


@pytest.mark.parametrize("wrong", [-1, 300, 2**40])
def test_an_id_that_the_model_cannot_emit_is_the_error_of_its_request(wrong: int) -> None:
    with pytest.raises(TokenIdError, match=f"token id {wrong}, the model's ids are 0 to 299"):
        make_token_logprobs(LogprobRow([1, wrong], [-1.0, -1.0], sampled_rank=1), TABLE)


@pytest.mark.parametrize("row", [LogprobRow([], [], 1), LogprobRow([1, 2], [-1.0], 1)])
def test_a_row_whose_parts_do_not_fit_is_the_error_of_its_request(row: LogprobRow) -> None:
    with pytest.raises(EngineGenerateError, match="log-probabilities for"):
        make_token_logprobs(row, TABLE)
