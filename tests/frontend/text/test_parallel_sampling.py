"""Parallel sampling: what a request for several choices becomes, and how the ends of the choices become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.frontend.requests.output.parallel_sampling import Family, fan_out, repeat_choice
from trio_llm.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from trio_llm.sampling import MAX_N, RequestOutputKind, SamplingParams
from trio_llm.wire.messages import EngineCoreRequest

LAST, FIRST = 2**63 - 1, -(2**63)


def a_request(**params: object) -> EngineCoreRequest:
    return EngineCoreRequest("p", [1, 2], SamplingParams(**params), priority=3)  # type: ignore[arg-type]


def an_end(index: int, text: str = "") -> RequestOutput:
    return RequestOutput("r", 2, 0, [CompletionOutput(index, text, [1], None, "length")], True)


def test_a_request_for_one_choice_is_left_as_it_is() -> None:
    request = a_request(seed=5)

    assert fan_out(request) == [request]
    assert fan_out(request)[0] is request


def test_children_differ_from_their_parent_in_nothing_but_id_seed_and_n() -> None:
    children = fan_out(a_request(seed=5, n=3, top_p=0.5, stop=("x",)))

    assert children == [
        EngineCoreRequest(f"{i}_p", [1, 2], SamplingParams(seed=5 + i, top_p=0.5, stop=("x",)), priority=3)
        for i in range(3)
    ]


@given(seed=st.one_of(st.integers(FIRST, LAST), st.integers(LAST - MAX_N, LAST)), n=st.integers(2, MAX_N))
def test_seeds_of_children_go_up_by_one_and_wrap_to_64_bits(seed: int, n: int) -> None:
    seeds = [child.params.seed for child in fan_out(a_request(seed=seed, n=n))]

    assert seeds[0] == seed
    assert all(FIRST <= one <= LAST for one in seeds if one is not None)
    assert [one % 2**64 for one in seeds if one is not None] == [(seed + i) % 2**64 for i in range(n)]


def test_greedy_choices_are_one_request() -> None:
    assert fan_out(a_request(seed=5, n=4, temperature=0)) == [a_request(seed=5, temperature=0)]


@given(order=st.permutations(range(4)), kind=st.sampled_from(RequestOutputKind))
def test_only_the_last_end_of_all_is_the_end(order: list[int], kind: RequestOutputKind) -> None:
    family = Family([f"{i}_p" for i in range(4)], kind)

    ends = [family.finish(an_end(index, f"text {index}")) for index in order]

    *others, last = ends
    assert last is not None
    assert last.finished
    if kind is RequestOutputKind.FINAL_ONLY:
        assert others == [None] * 3
        assert [(choice.index, choice.text) for choice in last.outputs] == [(i, f"text {i}") for i in range(4)]
    else:
        assert [(end.finished, end.outputs[0].index) for end in others if end] == [(False, i) for i in order[:3]]


def test_a_choice_that_ends_twice_is_a_bug_that_shows() -> None:
    family = Family(["0_p", "1_p"], RequestOutputKind.DELTA)
    family.finish(an_end(0))

    with pytest.raises(KeyError):
        family.finish(an_end(0))


def test_the_first_token_of_all_is_taken_once() -> None:
    family = Family(["0_p", "1_p"], RequestOutputKind.DELTA)

    assert [family.take_first_token() for _ in range(3)] == [True, False, False]


def test_repeated_choices_are_equal_and_share_no_list() -> None:
    entry = TokenLogprobs(Logprob(7, -1.0, 1, "a", b"a"), ())
    output = RequestOutput("r", 2, 1, [CompletionOutput(0, "a", [7], [entry], "stop", "x")], True)

    repeated = repeat_choice(output, 3)

    assert [choice.index for choice in repeated.outputs] == [0, 1, 2]
    assert (repeated.num_prompt_tokens, repeated.num_cached_tokens, repeated.finished) == (2, 1, True)
    repeated.outputs[0].token_ids.append(8)
    assert repeated.outputs[0].logprobs is not None
    repeated.outputs[0].logprobs.clear()
    for choice in repeated.outputs[1:]:
        assert (choice.text, choice.token_ids, choice.logprobs) == ("a", [7], [entry])
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "x")
