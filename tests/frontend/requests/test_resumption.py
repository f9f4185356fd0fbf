from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from trio_llm.frontend.requests.resumption import Resumption


@dataclass(eq=False)
class Request:
    name: str
    num_tokens: int = 0
    num_tokens_when_sent: int | None = None
    num_deaths: int = 0
    sent: list[str] = field(default_factory=list)


def send(requests: list[Request]) -> list[str]:
    for request in requests:
        request.num_tokens_when_sent = request.num_tokens
    return [request.name for request in requests]


def test_after_one_death_all_go_on_at_once() -> None:
    resumption, requests = Resumption[Request](), [Request(name) for name in "abc"]
    send(requests)

    assert resumption.engine_lost(requests) is None
    assert send(resumption.take(requests)) == ["a", "b", "c"]


def test_those_without_a_token_at_two_deaths_are_tried_one_at_a_time_and_the_others_are_not() -> None:
    resumption, requests = Resumption[Request](), [Request(name) for name in "abcd"]
    for _ in range(2):
        send(requests)
        requests[1].num_tokens += 1
        assert resumption.engine_lost(requests) is None

    assert send(resumption.take(requests)) == ["b", "a"]
    assert send(resumption.finish(requests[1])) == []
    assert send(resumption.finish(requests[0])) == ["c"]
    assert send(resumption.finish(requests[2])) == ["d"]
    assert send(resumption.finish(requests[3])) == []
    assert resumption.on_trial is None


def test_the_one_on_trial_when_an_engine_dies_is_given_up_and_its_neighbours_are_not() -> None:
    resumption, requests = Resumption[Request](), [Request(name) for name in "abc"]
    for _ in range(2):
        send(requests)
        resumption.engine_lost(requests)
    send(resumption.take(requests))
    send(resumption.finish(requests[0]))
    requests[0].num_tokens += 1

    assert resumption.engine_lost(requests) is requests[1]
    assert [request.num_deaths for request in requests] == [0, 3, 2]


def test_a_suspect_that_ends_before_its_turn_is_not_tried() -> None:
    resumption, requests = Resumption[Request](), [Request(name, num_deaths=2) for name in "abc"]

    assert send(resumption.take(requests)) == ["a"]
    assert resumption.finish(requests[1]) == []
    assert send(resumption.finish(requests[0])) == ["c"]


def test_a_death_before_a_request_was_sent_does_not_count_against_it() -> None:
    resumption, requests = Resumption[Request](), [Request("a")]
    for _ in range(5):
        assert resumption.engine_lost(requests) is None

    assert send(resumption.take(requests)) == ["a"]


@given(count=st.integers(1, 16), poisoned=st.integers(0, 15))
def test_a_request_that_kills_every_engine_is_given_up_alone_after_three_deaths_and_a_trial_each(
    count: int, poisoned: int
) -> None:
    """The engine dies as soon as it gets the poisoned one; the others get a token only if it is not there."""
    requests = [Request(str(i)) for i in range(count)]
    poison = requests[poisoned % count]
    resumption, left, num_deaths, given_up = Resumption[Request](), list(requests), 0, []
    queue = list(resumption.take(left))
    while queue:
        send(queue)
        if poison in queue:
            num_deaths += 1
            suspect = resumption.engine_lost(left)
            if suspect is not None:
                given_up.append(suspect)
                left = [request for request in left if request is not suspect]
            queue = list(resumption.take(left))
            continue
        served, queue = queue, []
        for request in served:
            request.num_tokens += 1
            queue += resumption.finish(request)

    assert given_up == [poison]
    assert num_deaths == 3
    assert all(request.num_tokens > 0 for request in left)


def test_what_the_engine_only_keeps_is_not_blamed_not_even_on_trial() -> None:
    resumption, requests = Resumption[Request](), [Request("held"), Request("runs")]
    held, runs = requests
    for _ in range(2):
        send(resumption.take(requests))
        assert resumption.engine_lost(requests, could_run=lambda request: request is runs) is None
    assert (held.num_deaths, runs.num_deaths) == (0, 2)

    assert send(resumption.take(requests)) == ["held", "runs"]
    assert resumption.on_trial is runs
    assert resumption.engine_lost(requests, could_run=lambda request: False) is None
    send(resumption.take(requests))
    assert resumption.engine_lost(requests) is runs
