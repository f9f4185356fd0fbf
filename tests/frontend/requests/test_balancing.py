from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineUnavailableError, InvalidRequestError
from trio_llm.frontend.requests.balancing import (
    ANYWHERE,
    MAX_SESSION_ID_CHARS,
    Balancer,
    EngineLoad,
    Routing,
    hash_beginnings,
)
from trio_llm.wire.work import ANSWER_TOKEN_WORK, EXPECTED_ANSWER_TOKENS, measure_work

PROMPT = list(range(100, 200))


def loads(*works: int) -> list[EngineLoad]:
    return [EngineLoad(own_work=work) for work in works]


# ------------------------------------------------------------------------------------ the least work


def test_the_engine_with_the_least_work_is_chosen_and_of_several_the_first() -> None:
    assert Balancer(3).choose(loads(30, 10, 20)) == 1
    assert Balancer(3).choose(loads(10, 10, 10)) == 0


def test_front_ends_that_begin_together_begin_with_different_engines() -> None:
    assert [Balancer(3, front_end_index=index).choose(loads(5, 5, 5)) for index in range(5)] == [0, 1, 2, 0, 1]


def test_what_an_engine_owes_to_other_front_ends_counts() -> None:
    balancer = Balancer(2)

    assert balancer.choose([EngineLoad(own_work=10, others_work=50), EngineLoad(own_work=40)]) == 1


def test_of_several_front_ends_each_corrects_its_part_of_what_all_see() -> None:
    balancer = Balancer(2, num_front_ends=4)

    assert balancer.choose([EngineLoad(own_work=10, others_work=100), EngineLoad(own_work=40)]) == 0
    assert balancer.choose([EngineLoad(own_work=10, others_work=160), EngineLoad(own_work=40)]) == 1


def test_engines_that_are_up_come_before_others_however_busy_they_are() -> None:
    balancer = Balancer(3)
    dead, down, busy = EngineLoad(is_up=False, is_dead=True), EngineLoad(is_up=False), EngineLoad(own_work=10**9)

    assert balancer.choose([dead, down, busy]) == 2
    assert balancer.choose([dead, down, dead]) == 1
    assert balancer.choose([dead, dead, dead]) == 0


def test_work_is_counted_in_prompt_tokens_and_an_answer_as_no_longer_than_usual() -> None:
    assert measure_work(100, 0) == 100
    assert measure_work(100, 3) == 100 + 3 * ANSWER_TOKEN_WORK
    assert measure_work(0, 10**6) == EXPECTED_ANSWER_TOKENS * ANSWER_TOKEN_WORK


def test_a_token_of_an_answer_counts_by_its_share_of_a_step() -> None:
    config = EngineConfig()

    assert config.max_num_batched_tokens / config.max_num_seqs == ANSWER_TOKEN_WORK


# ------------------------------------------------------------------------------------ ranks and sessions


def test_a_rank_is_obeyed_also_if_its_engine_is_busy_or_started_again() -> None:
    balancer = Balancer(2, first_rank=4)
    routing = Routing(data_parallel_rank=5)

    assert balancer.choose(loads(0, 10**9), routing) == 1
    assert balancer.choose([EngineLoad(), EngineLoad(is_up=False)], routing) == 1
    with pytest.raises(EngineUnavailableError, match="data_parallel_rank 5"):
        balancer.choose([EngineLoad(), EngineLoad(is_up=False, is_dead=True)], routing)


@pytest.mark.parametrize("rank", [-1, 3, 6, True, "4", 4.0])
def test_a_rank_that_is_not_here_is_refused(rank: object) -> None:
    with pytest.raises(InvalidRequestError, match="from 4 to 5") as caught:
        Balancer(2, first_rank=4).check(Routing(data_parallel_rank=rank))  # type: ignore[arg-type]

    assert caught.value.param == "data_parallel_rank"


def test_the_server_of_one_rank_says_so() -> None:
    balancer = Balancer.of(EngineConfig(data_parallel_size=4, data_parallel_rank=2), num_engines=1)

    balancer.check(Routing(data_parallel_rank=2))
    with pytest.raises(InvalidRequestError, match="must be 2, the only rank of this server, not 1"):
        balancer.check(Routing(data_parallel_rank=1))


@pytest.mark.parametrize("session_id", ["", "x" * (MAX_SESSION_ID_CHARS + 1), 7, "\ud800"])
def test_a_session_id_is_a_text_of_some_length(session_id: object) -> None:
    with pytest.raises(InvalidRequestError, match="session_id"):
        Balancer(2).check(Routing(session_id=session_id))  # type: ignore[arg-type]


def test_a_session_stays_with_its_engine_until_that_is_down() -> None:
    balancer = Balancer(2)
    routing = Routing(session_id="s")

    assert balancer.choose(loads(5, 0), routing) == 1
    assert balancer.choose(loads(0, 10**9), routing) == 1
    assert balancer.choose(loads(0, 10**9), Routing(session_id="other")) == 0
    assert balancer.choose([EngineLoad(), EngineLoad(is_up=False)], routing) == 0
    assert balancer.choose(loads(10, 0), routing) == 0, "it has moved"


def test_a_session_that_named_a_rank_once_stays_there() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(0, 0), Routing(session_id="s", data_parallel_rank=1))

    assert balancer.choose(loads(0, 10), Routing(session_id="s")) == 1


def test_only_so_many_sessions_are_remembered_and_the_oldest_are_forgotten() -> None:
    balancer = Balancer(2)
    for number in range(20_000):
        balancer.choose(loads(1, 0), Routing(session_id=str(number)))

    assert balancer.choose(loads(0, 1), Routing(session_id="0")) == 0
    assert balancer.choose(loads(0, 1), Routing(session_id="19999")) == 1
    assert len(balancer._engine_of_session) < 20_000


# ------------------------------------------------------------------------------------ beginnings


def test_beginnings_double_in_length_and_depend_on_every_token_and_on_the_salt() -> None:
    assert [count for _, count in hash_beginnings(range(300), None)] == [32, 64, 128, 256]
    assert [count for _, count in hash_beginnings(range(100_000), None)][-1] == 4096
    assert hash_beginnings(range(31), None) == []
    first, second = hash_beginnings(range(70), None), hash_beginnings([*range(40), 1, *range(41, 70)], None)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert hash_beginnings(range(70), "salt")[0] != first[0]


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(1, 0), ANYWHERE, PROMPT)

    assert balancer.choose(loads(0, 100), ANYWHERE, [*PROMPT[:70], 1, 2, 3]) == 1
    assert balancer.choose(loads(0, 100), ANYWHERE, list(range(100))) == 0
    assert balancer.choose(loads(0, 100), ANYWHERE, PROMPT, "salt") == 0


def test_of_two_beginnings_the_longer_one_counts() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(0, 1), ANYWHERE, PROMPT[:40])
    balancer.choose(loads(1, 0), ANYWHERE, [*PROMPT[:16], *range(100)])
    balancer.choose(loads(500, 0), ANYWHERE, PROMPT)  # too busy for 32 tokens: both know them now

    assert balancer.choose(loads(0, 100), ANYWHERE, [*PROMPT[:64], 1]) == 1


def test_affinity_gives_way_when_its_engine_has_far_more_to_do_and_then_both_have_the_beginning() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(1, 0), ANYWHERE, PROMPT)

    assert balancer.choose(loads(0, 500), ANYWHERE, PROMPT) == 1
    assert balancer.choose(loads(0, 520), ANYWHERE, PROMPT) == 0, "8 times the 64 tokens"
    assert balancer.choose(loads(10, 0), ANYWHERE, PROMPT) == 1
    assert balancer.choose(loads(0, 10), ANYWHERE, PROMPT) == 0


def test_the_busier_all_are_the_more_may_one_have() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(1, 0), ANYWHERE, PROMPT)

    assert balancer.choose(loads(100_000, 125_500), ANYWHERE, PROMPT) == 1


def test_with_a_dead_engine_goes_what_was_in_its_cache() -> None:
    balancer = Balancer(2)
    balancer.choose(loads(1, 0), Routing(session_id="s"), PROMPT)
    balancer.forget(1)

    assert balancer.choose(loads(0, 1), ANYWHERE, PROMPT) == 0
    assert balancer.choose(loads(0, 1), Routing(session_id="s")) == 0


def test_affinity_can_be_switched_off_and_goes_with_the_prefix_cache() -> None:
    for config in (
        EngineConfig(data_parallel_size=2, enable_prefix_affinity=False),
        EngineConfig(data_parallel_size=2, enable_prefix_caching=False),
    ):
        balancer = Balancer.of(config, num_engines=2)
        balancer.choose(loads(1, 0), ANYWHERE, PROMPT)

        assert balancer.choose(loads(0, 1), ANYWHERE, PROMPT) == 0


def test_only_so_many_beginnings_are_remembered() -> None:
    balancer = Balancer(2)
    for number in range(20_000):
        balancer.choose(loads(1, 0), ANYWHERE, [number] * 32)

    assert len(balancer._engines_of_beginning) < 20_000
    assert balancer.choose(loads(0, 1), ANYWHERE, [0] * 32) == 0
    assert balancer.choose(loads(0, 1), ANYWHERE, [19_999] * 32) == 1


# ------------------------------------------------------------------------------------ late reports

STEP_S = 0.1
REPORT_DELAY_S = 2.0
RUNNING = 64
"""Answers that get a token in each step; others wait."""
PROMPT_TOKENS, ANSWER_TOKENS = 64, 200


@dataclass(eq=False)
class Asked:
    front_end: int
    is_computed: bool = False
    num_left: int = ANSWER_TOKENS

    @property
    def work(self) -> int:
        return measure_work(0 if self.is_computed else PROMPT_TOKENS, self.num_left)


@dataclass
class SimulatedEngine:
    requests: list[Asked] = field(default_factory=list)
    history: deque[list[int]] = field(default_factory=deque)
    """Per step: the work of each front end's requests."""

    def step(self, num_front_ends: int) -> None:
        for request in self.requests[:RUNNING]:
            request.is_computed = True
            request.num_left -= 1
        self.requests = [request for request in self.requests if request.num_left]
        self.history.append([self.work_of(index) for index in range(num_front_ends)])
        if len(self.history) > round(REPORT_DELAY_S / STEP_S) + 1:
            self.history.popleft()

    def work_of(self, front_end: int) -> int:
        return sum(request.work for request in self.requests if request.front_end == front_end)

    @property
    def work(self) -> int:
        return sum(request.work for request in self.requests)

    def load_for(self, front_end: int) -> EngineLoad:
        late = self.history[0] if self.history else []
        others = sum(work for index, work in enumerate(late) if index != front_end)
        return EngineLoad(own_work=self.work_of(front_end), others_work=others)


def simulate(arrivals_at: Callable[[int], int], *, num_front_ends: int) -> list[float]:
    """512 equal requests of front ends at random; the ratio of the engines' work after each step.

    Steps whose work is about one batch's are left out: requests are not divided.
    """
    engines = [SimulatedEngine(), SimulatedEngine()]
    balancers = [
        Balancer(2, prefix_affinity=False, num_front_ends=num_front_ends, front_end_index=index)
        for index in range(num_front_ends)
    ]
    dice, num_asked, ratios = random.Random(5), 0, []
    for number in range(3000):
        for _ in range(min(arrivals_at(number), 512 - num_asked)):
            num_asked += 1
            front_end = dice.randrange(num_front_ends)
            index = balancers[front_end].choose([engine.load_for(front_end) for engine in engines])
            engines[index].requests.append(Asked(front_end))
        for engine in engines:
            engine.step(num_front_ends)
        works = [engine.work for engine in engines]
        if min(works) > 8 * measure_work(PROMPT_TOKENS, ANSWER_TOKENS):
            ratios.append(max(works) / min(works))
        if num_asked == 512 and not any(works):
            return ratios
    raise AssertionError("the requests are not finished")


@pytest.mark.parametrize("num_front_ends", [1, 2, 4])
@pytest.mark.parametrize("arrivals", ["all at once", "a few in each step", "in bursts"])
def test_512_equal_requests_stay_balanced_though_reports_are_two_seconds_late(
    arrivals: str, num_front_ends: int
) -> None:
    patterns: dict[str, Callable[[int], int]] = {
        "all at once": lambda number: 512,
        "a few in each step": lambda number: 4,
        "in bursts": lambda number: 64 if number % 25 == 0 else 0,
    }

    ratios = simulate(patterns[arrivals], num_front_ends=num_front_ends)

    assert len(ratios) > 50
    assert max(ratios) <= 1.3
