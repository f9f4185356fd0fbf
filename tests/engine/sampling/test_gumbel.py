"""Noise: a fixed function of its key, and of the right distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.engine.sampling import gumbel

INT64 = st.integers(-(2**63), 2**63 - 1)


def row_key(seed: int, position: int) -> int:
    return int(gumbel.row_keys(gumbel.mix_seeds(torch.tensor([seed])), torch.tensor([position])))


def gumbel_noise(keys: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    return gumbel.gumbel_noise(torch.tensor(keys), gumbel.token_hashes(token_ids))


def ids(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32).unsqueeze(0)


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=2, max_size=5))
def test_a_row_is_the_same_alone_and_among_others(keys: list[tuple[int, int]]) -> None:
    together = gumbel_noise([row_key(*key) for key in keys], ids(301))

    for row, key in enumerate(keys):
        assert torch.equal(together[row], gumbel_noise([row_key(*key)], ids(301))[0])
    assert together.isfinite().all()


def test_a_token_gets_the_same_noise_wherever_it_stands_among_the_ids() -> None:
    keys = [row_key(1, 2)]

    assert torch.equal(
        gumbel_noise(keys, ids(50))[:, [7, 30]], gumbel_noise(keys, torch.tensor([[7, 30]], dtype=torch.int32))
    )


def test_neighbouring_seeds_and_positions_give_different_noise() -> None:
    seeds, positions = torch.arange(-50, 50).repeat_interleave(100), torch.arange(100).repeat(100)

    assert len(gumbel.row_keys(gumbel.mix_seeds(seeds), positions).unique()) == 10_000


def test_the_noise_of_many_keys_and_tokens_is_gumbel_distributed() -> None:
    noise = gumbel_noise([row_key(seed, 3) for seed in range(200)], ids(1000)).double().flatten()

    assert noise.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        threshold = -math.log(-math.log(quantile))
        share = (noise <= threshold).double().mean().item()
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / noise.numel())


def test_the_same_token_at_following_positions_is_not_correlated() -> None:
    noise = gumbel_noise([row_key(7, position) for position in range(1001)], ids(200)).double()

    correlation = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]

    assert abs(correlation.item()) < 5 / math.sqrt(noise.numel())


def test_the_noise_never_changes_between_versions() -> None:
    expected = torch.tensor([1.942264, -0.571938, 0.944734, -0.51339])

    torch.testing.assert_close(gumbel_noise([row_key(42, 7)], ids(4))[0], expected)
