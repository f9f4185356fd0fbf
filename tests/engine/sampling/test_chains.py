"""A new filter or logits processor is one entry in its list: here some that no release has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from tests.engine.sampling.rows import make_row, run, sample, token_of
from trio_llm.engine.sampling.filters import FILTERS, Filter
from trio_llm.engine.sampling.logits_processors.base import LogitsProcessor, ProcessedRow
from trio_llm.engine.sampling.logits_processors.chain import LOGITS_PROCESSORS
from trio_llm.engine.sampling.logits_processors.sampler_state import SamplerState
from trio_llm.engine.sampling.sampler import Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

WIDTH = 300
CPU = torch.device("cpu")
MADE_UP_SEEDS = range(100, 200)
"""What parameters say about the made-up filter and processor: those with such a seed want them."""

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cold": {"temperature": 0.7},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 20},
    "penalty": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 2.0}},
}


class TopTwoFilter(Filter):
    """Keeps the two likeliest tokens."""

    @staticmethod
    def applies(params: SamplingParams, width: int) -> bool:
        return params.seed in MADE_UP_SEEDS

    @classmethod
    def make(cls, rows: Rows[SamplingParams], *, width: int, device: torch.device) -> Self:
        assert rows
        assert all(cls.applies(row, width) for row in rows)
        return cls()

    def threshold(self, logits: Tensor) -> Tensor:
        return logits.topk(2, dim=1)[0][:, 1:]


class OnlyToken(LogitsProcessor):
    """Lets rows have one token alone, for two steps; then it is made again."""

    num_steps = 2

    def __init__(self, rows: Rows[ProcessedRow], token_id: int) -> None:
        self._rows = torch.tensor([row.index for row in rows])
        self._token_id = token_id

    @staticmethod
    def applies(sequence: Sequence, position: int) -> bool:
        return sequence.params.seed in MADE_UP_SEEDS

    @classmethod
    def make(cls, rows: Rows[ProcessedRow], state: SamplerState) -> Self:
        return cls(rows, token_id=42)

    def apply(self, scores: Tensor, previous: Tensor) -> None:
        scores.index_fill_(0, self._rows, -torch.inf)
        scores[self._rows, self._token_id] = 0.0


def make_rows(seeds: range) -> list[Sequence]:
    """One row for each pair of options, with seeds from a range."""
    pairs = [(name,) for name in OPTIONS] + list(itertools.combinations(OPTIONS, 2))
    return [
        make_row([1, 2, 3], num_output_tokens=2, **{"seed": seed, **OPTIONS[names[0]], **OPTIONS[names[-1]]})
        for seed, names in zip(seeds, pairs, strict=False)
    ]


def random_logits(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)) * 2


@pytest.mark.parametrize("place", range(len(FILTERS) + 1))
def test_a_made_up_filter_acts_on_its_rows_alone_wherever_it_stands_in_the_list(place: int) -> None:
    filters: list[type[Filter]] = [*FILTERS]
    filters.insert(place, TopTwoFilter)
    plain, special = make_rows(range(100)), make_rows(MADE_UP_SEEDS)
    rows = [row for pair in zip(plain, special, strict=True) for row in pair]
    logits = random_logits(len(rows))

    def sampler() -> Sampler:
        return Sampler((), width=WIDTH, device=CPU, filters=filters)

    together = sample(logits, rows, sampler=sampler())

    assert together[::2] == sample(logits[::2], plain)
    alone = [sample(logits[i : i + 1], [row], sampler=sampler())[0] for i, row in enumerate(rows)]
    assert together == alone
    for row, one, result in zip(logits[1::2], special, together[1::2], strict=True):
        if not one.params.logit_bias and not one.params.frequency_penalty:
            assert token_of(result) in row.topk(2)[1]
    assert together[1::2] != sample(logits[1::2], special)


@pytest.mark.parametrize("place", range(len(LOGITS_PROCESSORS) + 1))
def test_a_made_up_processor_acts_on_its_rows_alone_for_as_many_steps_as_it_is_good_for(place: int) -> None:
    processors: list[type[LogitsProcessor]] = [*LOGITS_PROCESSORS]
    processors.insert(place, OnlyToken)
    plain, special, twins = make_rows(range(100)), make_rows(MADE_UP_SEEDS), make_rows(range(100))
    rows = [row for pair in zip(plain, special, strict=True) for row in pair]
    sampler = Sampler((), width=WIDTH, device=CPU, processors=processors)

    def logits_at(sequence: Sequence, length: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(length))

    steps = run(sampler, rows, logits_at=logits_at, num_steps=5)
    expected = run(Sampler((), width=WIDTH, device=CPU), twins, logits_at=logits_at, num_steps=5)

    assert [step[::2] for step in steps] == expected
    assert {token_of(result) for step in steps for result in step[1::2]} == {42}
