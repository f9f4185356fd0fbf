"""How the rows of a batch are sorted: in few slices for every filter, and each row goes back to its place."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.engine.sampling.row_order import RowIndex, RowOrder

Row = tuple[bool, bool, tuple[bool, ...]]
NUM_FILTERS = 3

ROW: st.SearchStrategy[Row] = st.tuples(st.booleans(), st.booleans(), st.tuples(*[st.booleans()] * NUM_FILTERS)).map(
    lambda row: row if row[1] else (row[0], False, (False,) * NUM_FILTERS)
)


def make_order(rows: list[Row]) -> RowOrder:
    return RowOrder(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [[row[2][number] for row in rows] for number in range(NUM_FILTERS)],
    )


@given(rows=st.lists(ROW, min_size=1, max_size=30))
def test_rows_to_process_and_rows_to_draw_are_one_slice_each(rows: list[Row]) -> None:
    order = make_order(rows)
    is_processed = [rows[i][0] for i in order.rows]
    is_drawn = [rows[i][1] for i in order.rows]

    assert sorted(order.rows) == list(range(len(rows)))
    assert all(is_processed[: order.num_processed])
    assert not any(is_processed[order.num_processed :])
    assert all(is_drawn[order.num_scores - order.num_drawn : order.num_scores])
    assert sum(is_drawn) == order.num_drawn
    assert not any(is_processed[order.num_scores :])


@given(rows=st.lists(ROW, min_size=1, max_size=30))
def test_the_slices_of_a_filter_hold_its_rows_and_are_few(rows: list[Row]) -> None:
    order = make_order(rows)

    for number in range(NUM_FILTERS):
        slices = order.slices_of(number)
        found = [i for part in slices for i in order.rows[part]]

        assert sorted(found) == [i for i, row in enumerate(rows) if row[2][number]]
        assert all(before.stop < after.start for before, after in itertools.pairwise(slices))
        # The last filter has one slice at most, the one before it three.
        assert len(slices) < 2 ** (NUM_FILTERS - number)


@given(rows=st.lists(ROW, min_size=1, max_size=30))
def test_rows_that_are_taken_apart_by_the_index_come_back_in_the_order_of_the_batch(rows: list[Row]) -> None:
    order = make_order(rows)
    index = RowIndex(order, torch.device("cpu"))
    batch = torch.arange(len(rows))

    scores = batch if index.scores is None else batch[index.scores]
    greedy = batch[:0] if index.greedy is None else batch[index.greedy]
    if order.num_scores == 0 and index.scores is None:
        scores, greedy = batch[:0], batch
    together = torch.cat((scores, greedy))
    back = together if index.back is None else together[index.back]

    assert back.tolist() == batch.tolist()
    assert len(scores) == order.num_scores
    if index.greedy is not None:
        assert [i for run in index.greedy_runs for i in batch[run].tolist()] == index.greedy.tolist()


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_batch_of_equal_rows_is_left_as_it_is(is_drawn: bool) -> None:
    order = make_order([(False, is_drawn, (False,) * NUM_FILTERS)] * 5)
    index = RowIndex(order, torch.device("cpu"))

    assert (index.scores, index.greedy, index.back) == (None, None, None)
