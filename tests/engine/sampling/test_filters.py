"""top-k and top-p keep what transformers' processors keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from trio_llm.engine.sampling.filters import MinPFilter, TopFilter

CPU = torch.device("cpu")


def kept(logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float] | None = None) -> torch.Tensor:
    top = TopFilter(top_k, top_p, min_p or [0.0] * len(top_k), width=logits.shape[1], device=CPU)
    return logits >= top.threshold(logits)


def kept_by_transformers(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    row = logits.unsqueeze(0).double()  # its sums start at the unlikely end, and lose more in float32
    if min_p:
        row = MinPLogitsWarper(min_p)(None, row)
    if top_k:
        row = TopKLogitsWarper(top_k)(None, row)
    if top_p < 1:
        row = TopPLogitsWarper(top_p)(None, row)
    return row[0] > float("-inf")


ROW = st.tuples(
    st.sampled_from([0, 1, 2, 50, 1023, 1024, 1025, 2900]),
    st.sampled_from([0.01, 0.3, 0.9, 0.99, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0]),
    st.sampled_from([0.2, 1.0, 5.0]),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_masks_equal_those_of_transformers_for_peaked_and_flat_rows(
    rows: list[tuple[int, float, float, float]], seed: int
) -> None:
    torch.manual_seed(seed)
    spread = torch.tensor([spread for *_, spread in rows]).unsqueeze(1)
    logits = torch.randn(len(rows), 3000) * spread

    found = kept(logits, [k for k, *_ in rows], [p for _, p, *_ in rows], [m for _, _, m, _ in rows])

    for i, (top_k, top_p, min_p, _) in enumerate(rows):
        expected = kept_by_transformers(logits[i], top_k, top_p, min_p)
        # A sum may fall on the other side of p by rounding: tokens at the edge, which weigh next to nothing or are one.
        differing = torch.softmax(logits[i].double(), dim=0)[found[i] ^ expected]
        assert len(differing) <= 1 or differing.sum() < 1e-6, (top_k, top_p, min_p)
        assert found[i].any()


@pytest.mark.parametrize("min_p", [1e-9, 0.01, 0.5, 1.0])
def test_min_p_alone_keeps_what_transformers_keeps(min_p: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(20, 3000)

    found = logits >= MinPFilter([min_p] * 20, CPU).threshold(logits)

    assert torch.equal(found, MinPLogitsWarper(min_p)(None, logits) > float("-inf"))
    assert found.any(1).all()


def test_what_a_row_keeps_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 3000).mul_(8).round_().div_(8)  # many equal values, as in bfloat16
    top_k, top_p = [5, 0, 2000, 40, 0, 1], [1.0, 0.95, 0.9, 0.5, 0.2, 1.0]
    min_p = [0.0, 0.0, 0.001, 0.1, 0.0, 1.0]

    together = kept(logits, top_k, top_p, min_p)

    for i in range(6):
        one = slice(i, i + 1)
        assert torch.equal(together[i], kept(logits[one], top_k[one], top_p[one], min_p[one])[0])


def test_a_row_that_is_not_finite_takes_no_other_along() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 3000)
    expected = kept(logits, [5, 0, 5, 0], [0.9] * 4)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = logits.clone()
        spoilt[1] = bad
        spoilt[2, 7] = bad

        found = kept(spoilt, [5, 0, 5, 0], [0.9] * 4)

        assert torch.equal(found[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.6), (2, 0.5)])
def test_tokens_of_equal_logits_stay_together(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0, -1.0]])

    assert kept(logits, [top_k], [top_p]).tolist() == [[False, True, True, True, True, False]]


def test_a_row_with_banned_tokens_keeps_only_others() -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 0.5, float("-inf")]])

    assert kept(logits, [2], [1.0]).tolist() == [[False, True, True, False]]
    assert kept(logits, [0], [0.99]).tolist() == [[False, True, True, False]]


def test_all_tokens_that_equal_the_last_of_top_k_count_in_top_p() -> None:
    logits = torch.tensor([[3.0, *[2.0] * 10, *[-9.0] * 20]])

    found = kept(logits, [2], [0.5])

    # The first alone has 0.21 of what top-k keeps, which is 11 tokens.
    assert found.sum() == 11
