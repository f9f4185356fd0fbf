"""What the sampler keeps between steps changes no token: kept, forgotten or made again, rows get the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.sampling.rows import expected_token, make_row, make_sampler, run, sample, token_of
from trio_llm.engine.sampling.sampler import Sampler
from trio_llm.engine.scheduling.sequence import Sequence, SequenceState
from trio_llm.sampling import SamplingParams

WIDTH = 50
LOGITS = torch.linspace(3, 0, WIDTH)
"""Flat enough for penalties to move the choice at every step."""

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 0.1},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"presence_penalty": -0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0, "bad_words": [[0, 1], [1, 2], [0, 0], [2, 1, 0]]},
    {"temperature": 0, "min_tokens": 40, "stop_token_ids": (0, 1), "frequency_penalty": 0.05},
]


def logits_at(sequence: Sequence, length: int) -> Tensor:
    return LOGITS


def make_rows() -> list[Sequence]:
    return [make_row([0, 3, 1], **{"seed": i, **fields}) for i, fields in enumerate(OPTIONS)]


def answers(rows: list[Sequence]) -> list[list[int]]:
    return [one.token_ids[one.num_prompt_tokens :] for one in rows]


def undisturbed(num_steps: int) -> list[list[int]]:
    rows = make_rows()
    run(make_sampler(WIDTH), rows, logits_at=logits_at, num_steps=num_steps)
    return answers(rows)


def step(sampler: Sampler, rows: list[Sequence]) -> None:
    run(sampler, rows, logits_at=logits_at, num_steps=1)


def test_many_steps_with_room_made_again_are_those_of_plain_rules() -> None:
    rows, num_steps = make_rows(), 300
    for one in rows:
        for _ in range(num_steps):
            token = expected_token(LOGITS, one)
            assert token is not None
            one.token_ids.append(token)

    assert undisturbed(num_steps) == answers(rows)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_sampler_that_sees_the_rows_for_the_first_time_gives_what_one_gives_that_kept_them(is_late: bool) -> None:
    rows = make_rows()

    for _ in range(30):
        run(make_sampler(WIDTH), rows, logits_at=logits_at, num_steps=1, is_late=is_late)

    assert answers(rows) == undisturbed(30)


def test_rows_that_come_and_go_and_change_places_get_what_they_get_undisturbed() -> None:
    sampler, rows = make_sampler(WIDTH), make_rows()
    generator = torch.Generator().manual_seed(0)
    other = make_row([4], seed=9, frequency_penalty=1.0)

    while min(map(len, answers(rows))) < 40:
        chosen = [i for i in torch.randperm(len(rows), generator=generator).tolist() if len(answers(rows)[i]) < 40]
        some = [rows[i] for i in chosen[: 1 + int(torch.randint(len(rows), (), generator=generator))]]
        run(sampler, [*some, other], logits_at=logits_at, num_steps=int(torch.randint(1, 4, (), generator=generator)))

    assert [answer[:40] for answer in answers(rows)] == undisturbed(40)


def test_rows_that_are_preempted_and_forgotten_get_what_they_get_undisturbed() -> None:
    sampler, rows = make_sampler(WIDTH), make_rows()
    for one in rows:
        one.state = SequenceState.RUNNING

    for _ in range(10):
        run(sampler, rows, logits_at=logits_at, num_steps=3)
        assert sampler.num_states == len(rows)
        for one in rows:
            one.state = SequenceState.WAITING
        sample(LOGITS.unsqueeze(0), [make_row([1], logit_bias={1: 1.0})], sampler=sampler)
        assert sampler.num_states == 1
        for one in rows:
            one.state = SequenceState.RUNNING

    assert answers(rows) == undisturbed(30)


def test_a_step_that_is_launched_again_gives_the_same() -> None:
    sampler, rows = make_sampler(WIDTH), make_rows()

    for _ in range(20):
        logits = LOGITS.expand(len(rows), -1)
        assert sample(logits, rows, sampler=sampler) == sample(logits, rows, sampler=sampler)
        step(sampler, rows)

    assert answers(rows) == undisturbed(20)


@pytest.mark.parametrize("num_dropped", [0, 1, 2, 3])
@pytest.mark.parametrize("num_new", [1, 2, 3, 4])
def test_a_sessions_next_input_begins_new_counts(num_new: int, num_dropped: int) -> None:
    """Also when steps were launched past the end of the answer, whose tokens are dropped."""
    sampler, rows = make_sampler(WIDTH), make_rows()
    run(sampler, rows, logits_at=logits_at, num_steps=6)
    lengths = [len(one.token_ids) for one in rows]
    run(sampler, rows, logits_at=logits_at, num_steps=num_dropped)
    for one, length, fields in zip(rows, lengths, OPTIONS, strict=True):
        del one.token_ids[length:]
        one.token_ids += [2, 0, 1, 1][:num_new]
        one.num_prompt_tokens = len(one.token_ids)
        one.params = SamplingParams(seed=1, **{name: value for name, value in fields.items() if name != "bad_words"})
    twins = [
        Sequence(
            request_id="b",
            token_ids=list(one.token_ids),
            num_prompt_tokens=one.num_prompt_tokens,
            params=one.params,
            bad_words=one.bad_words,
        )
        for one in rows
    ]

    run(sampler, rows, logits_at=logits_at, num_steps=8)
    run(make_sampler(WIDTH), twins, logits_at=logits_at, num_steps=8)

    assert answers(rows) == answers(twins)


def test_a_long_prompt_is_penalised_whole_and_once_each() -> None:
    prompt = list(range(WIDTH // 2)) * 40
    sequence = make_row(prompt, temperature=0, repetition_penalty=2.0)

    (result,) = sample(torch.full((1, WIDTH), 1.0).add_(torch.linspace(0.9, 0, WIDTH)), [sequence])

    assert token_of(result) == WIDTH // 2


def test_nothing_is_kept_of_plain_rows_and_little_of_traffic() -> None:
    sampler = make_sampler(WIDTH)
    logits = LOGITS.unsqueeze(0)
    for seed in range(100):
        sample(logits, [make_row([1], seed=seed, top_p=0.5, logprobs=1)], sampler=sampler)
    assert sampler.num_states == 0

    for seed in range(100):
        sequence = make_row([1], seed=seed, frequency_penalty=0.5, logit_bias={1: 1.0})
        sequence.state = SequenceState.RUNNING
        sample(logits, [sequence], sampler=sampler)
        sequence.state = SequenceState.FINISHED

    assert sampler.num_states == 1
    assert sampler.num_count_rows <= 4
