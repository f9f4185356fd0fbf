"""Assembly: outputs in, events out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.http.answers.assembly import (
    Assembler,
    Choice,
    ChoiceFinished,
    ChoiceStarted,
    Event,
    TextDelta,
    Usage,
    whole_choices,
)
from trio_llm.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs


def output(
    text: str,
    tokens: list[int],
    *,
    finish_reason: FinishReason | None = None,
    logprobs: bool = False,
    num_prompt_tokens: int = 4,
    index: int = 0,
) -> RequestOutput:
    positions = [position(token) for token in tokens] if logprobs else None
    completion = CompletionOutput(index, text, tokens, positions, finish_reason)
    return RequestOutput("r", num_prompt_tokens, 1, [completion], finish_reason is not None)


def position(token: int) -> TokenLogprobs:
    return TokenLogprobs(Logprob(token, -1.0, 1, str(token), b"%d" % token), ())


def test_all_choices_start_before_anything_else_happens() -> None:
    assembler = Assembler(num_prompts=2)

    events = assembler.feed(1, output("b", [1]))

    assert events == [ChoiceStarted(0), ChoiceStarted(1), TextDelta(1, "b", None, num_tokens=1)]


def test_a_token_whose_text_is_held_back_makes_no_event_and_counts_with_the_next_one() -> None:
    assembler = Assembler()
    assembler.feed(0, output("a", [1]))

    assert assembler.feed(0, output("", [2])) == []
    assert assembler.usage.num_output_tokens == 1
    assert assembler.feed(0, output("bc", [3])) == [TextDelta(0, "bc", None, num_tokens=2)]
    assert assembler.usage.num_output_tokens == 3


def test_logprobs_of_a_held_token_come_with_the_next_text() -> None:
    assembler = Assembler()
    assembler.feed(0, output("a", [1], logprobs=True))
    assembler.feed(0, output("", [2], logprobs=True))

    [event] = assembler.feed(0, output("bc", [3], logprobs=True))

    assert event == TextDelta(0, "bc", [position(2), position(3)], num_tokens=2)


def test_logprobs_that_are_still_held_at_the_end_come_with_the_end() -> None:
    assembler = Assembler()
    assembler.feed(0, output("", [1], logprobs=True))

    [event] = assembler.feed(0, output("", [], finish_reason="stop", logprobs=True))

    assert event == ChoiceFinished(0, "", [position(1)], "stop", None, num_tokens=1)


def test_usage_is_counted_over_all_prompts() -> None:
    assembler = Assembler(num_prompts=2)
    assembler.feed(0, output("a", [1, 2], finish_reason="length", num_prompt_tokens=3))
    assembler.feed(1, output("b", [3], finish_reason="stop", num_prompt_tokens=5))

    assert assembler.usage == Usage(num_prompt_tokens=8, num_cached_tokens=2, num_output_tokens=3)
    assert assembler.is_finished


def test_streams_that_end_without_a_finish_reason_are_an_error() -> None:
    assembler = Assembler()
    assembler.feed(0, output("a", [1]))

    with pytest.raises(EngineGenerateError, match="finish reason"):
        assembler.check_finished()


def test_an_output_after_the_end_is_an_error() -> None:
    assembler = Assembler()
    assembler.feed(0, output("a", [1], finish_reason="stop"))

    with pytest.raises(EngineGenerateError, match="after the last one"):
        assembler.feed(0, output("b", [2]))


def test_choices_are_counted_prompt_by_prompt() -> None:
    assembler = Assembler(num_prompts=2, choices_per_prompt=3)

    events = assembler.feed(1, output("x", [1], index=2, finish_reason="stop"))
    events += assembler.feed(0, output("y", [1], index=1, finish_reason="length"))

    assert events[:6] == [ChoiceStarted(index) for index in range(6)]
    assert events[6:] == [
        ChoiceFinished(5, "x", None, "stop", None, num_tokens=1),
        ChoiceFinished(1, "y", None, "length", None, num_tokens=1),
    ]
    assert not assembler.is_finished


def test_the_prompt_of_several_choices_is_counted_once_and_their_tokens_are_added_up() -> None:
    assembler = Assembler(choices_per_prompt=2)
    assembler.feed(0, output("a", [1, 2], index=1, finish_reason="stop"))
    assembler.feed(0, output("b", [3], index=0, finish_reason="stop"))

    assert assembler.usage == Usage(num_prompt_tokens=4, num_cached_tokens=1, num_output_tokens=3)
    assert assembler.is_finished


def test_only_the_choice_that_is_over_may_get_nothing_more() -> None:
    assembler = Assembler(choices_per_prompt=2)
    assembler.feed(0, output("a", [1], index=0, finish_reason="stop"))

    assert assembler.feed(0, output("b", [2], index=1)) == [TextDelta(1, "b", None, num_tokens=1)]
    with pytest.raises(EngineGenerateError, match="after the last one"):
        assembler.feed(0, output("c", [3], index=0))


@settings(max_examples=60)
@given(
    texts=st.lists(st.sampled_from(["", "a", "bc", "é"]), max_size=12),
    cuts=st.sets(st.integers(1, 11)),
    logprobs=st.booleans(),
)
def test_how_outputs_are_cut_does_not_change_the_whole(texts: list[str], cuts: set[int], logprobs: bool) -> None:
    tokens = list(range(len(texts)))

    def run(bounds: list[int]) -> tuple[list[Choice], Usage, list[Event]]:
        assembler = Assembler()
        events: list[Event] = []
        for start, stop in pairwise(bounds):
            is_last = stop == len(texts)
            piece = output(
                "".join(texts[start:stop]),
                tokens[start:stop],
                finish_reason="stop" if is_last else None,
                logprobs=logprobs,
            )
            events += assembler.feed(0, piece)
        return whole_choices(events), assembler.usage, events

    one_piece, one_usage, _ = run([0, len(texts)])
    many, usage, events = run([0, *sorted(cut for cut in cuts if cut < len(texts)), len(texts)])

    assert many == one_piece
    assert usage == one_usage
    assert all(event.text for event in events if isinstance(event, TextDelta))
    assert sum(isinstance(event, ChoiceStarted) for event in events) == 1
    assert [isinstance(event, ChoiceFinished) for event in events] == [False] * (len(events) - 1) + [True]
