"""The checks of `python -m benchmarks.recovery` find what they are there for."""

from __future__ import annotations

import copy

import pytest
import tokenizers

from benchmarks.recovery import Answer, Choice, Load, Request, compare, find_faults, make_requests
from trio_llm import SamplingParams
from trio_llm.outputs import CompletionOutput, Logprob, TokenLogprobs
from trio_llm.testing.answers import MODEL_DIR


def logprobs(token_id: int, margin: float) -> TokenLogprobs:
    first, second = (Logprob(i, -1.0 - margin * rank, rank + 1, "", b"") for rank, i in enumerate((token_id, 99)))
    return TokenLogprobs(first, (first, second))


def answer_of(text: str, *, margin: float = 1.0) -> Answer:
    ids = list(text.encode())
    return {0: Choice(ids, text, [logprobs(i, margin) for i in ids], "length")}


REQUEST = Request("x", SamplingParams(seed=1, max_tokens=5, logprobs=2, ignore_eos=True))


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_a_whole_answer_has_no_faults_and_is_identical_to_itself(tokenizer: tokenizers.Tokenizer) -> None:
    assert find_faults(REQUEST, answer_of("hello"), tokenizer) == []
    assert compare(answer_of("hello"), answer_of("hello")) == "identical"


@pytest.mark.parametrize(("text", "fault"), [("hell", "4 tokens in place of 5"), ("helloo", "6 tokens in place of 5")])
def test_a_token_that_is_lost_or_repeated_is_a_fault(text: str, fault: str, tokenizer: tokenizers.Tokenizer) -> None:
    (found,) = find_faults(REQUEST, answer_of(text), tokenizer)

    assert fault in found
    assert compare(answer_of("hello"), answer_of(text)) == "different"


def test_so_are_another_text_a_missing_log_probability_an_abort_and_a_missing_choice(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    for damage, fault in (
        (lambda choice: setattr(choice, "text", "hullo"), "its text"),
        (lambda choice: choice.logprobs.pop(), "log-probabilities"),
        (lambda choice: setattr(choice, "finish_reason", "abort"), "it ended by abort"),
        (lambda choice: setattr(choice, "is_rewritten", True), "was changed"),
    ):
        answer = answer_of("hello")
        damage(answer[0])
        (found,) = find_faults(REQUEST, answer, tokenizer)
        assert fault in found
    assert "0 choices in place of 1" in find_faults(REQUEST, {}, tokenizer)[0]


def test_a_difference_is_excused_only_where_two_tokens_were_equally_good() -> None:
    assert compare(answer_of("hello", margin=0.5), answer_of("hullo")) == "different"
    assert compare(answer_of("hello", margin=0.0005), answer_of("hullo")) == "excused"
    assert compare(answer_of("hello", margin=0.0005), answer_of("hell")) == "different"
    other = copy.deepcopy(answer_of("hello"))
    other[0].text = "hallo"
    assert compare(answer_of("hello", margin=0.0005), other) == "different"


def test_a_piece_that_takes_back_what_was_there_is_seen() -> None:
    choice = Choice()
    assert choice.take(CompletionOutput(0, "he", [1, 2]), is_all=True) == 2
    assert choice.take(CompletionOutput(0, "hel", [1, 2, 3]), is_all=True) == 1
    assert not choice.is_rewritten
    choice.take(CompletionOutput(0, "hul", [1, 9, 3]), is_all=True)

    assert choice.is_rewritten


def test_the_requests_have_all_that_the_recovery_must_keep() -> None:
    params = [request.params for request in make_requests(64, 40)]

    assert len(params) == 64
    assert {one.is_greedy for one in params} == {True, False}
    for has in (lambda one: one.n > 1, lambda one: one.stop, lambda one: one.logprobs is not None):
        assert any(has(one) for one in params)


def test_the_longest_silence_after_each_death_is_the_pause() -> None:
    load = Load("x", [])
    load._kills_s = [10.0, 20.0]
    load._deliveries_s = [1.0, 9.0, 10.5, 14.0, 14.5, 20.5, 21.0, 28.0]

    assert load.pauses_s == [3.5, 7.0]
