"""Parts of a block as one run of rows, and any rows of it."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.client.batches import BlockView


def part(rows: list[int], *, whole: bool = False) -> dict[str, np.ndarray]:
    """Sample 100 + r in row r."""
    ids = np.array(rows, np.int64)
    arrays = {"image": np.stack([ids, ids], axis=1), "sample_id": ids + 100}
    return arrays if whole else {**arrays, "row": ids}


def test_parts_are_put_together_in_order():
    view = BlockView([part([1, 4, 5]), part([0, 2, 7])])
    assert view.rows.tolist() == [0, 1, 2, 4, 5, 7]
    assert view.take(1, 5)["sample_id"].tolist() == [101, 102, 104, 105]
    assert len(view) == 6
    assert view.take(3, 3)["image"].shape == (0, 2)


def test_only_some_rows():
    view = BlockView([part([1, 4, 5]), part([0, 2, 7])]).only(np.array([0, 1, 4, 5]))
    assert view.rows.tolist() == [0, 1, 5, 7]
    assert view.take(0, 4)["sample_id"].tolist() == [100, 101, 105, 107]
    assert view.take(1, 3)["sample_id"].tolist() == [101, 105]


@pytest.mark.parametrize(("start", "stop", "is_view"), [(0, 2, True), (2, 5, True), (1, 3, False)])
def test_what_lies_in_one_piece_is_a_view(start, stop, is_view):
    """Rows 0, 1, 4, 5, 6 of a whole block."""
    block = part(list(range(8)), whole=True)
    view = BlockView([block]).only(np.array([0, 1, 4, 5, 6]))
    taken = view.take(start, stop)
    assert taken["sample_id"].tolist() == [[100, 101, 104, 105, 106][i] for i in range(start, stop)]
    assert np.shares_memory(taken["image"], block["image"]) == is_view


def test_a_run_inside_one_of_several_parts_is_a_view():
    one, two = part([0, 1, 2]), part([3, 4])
    assert np.shares_memory(BlockView([one, two]).take(0, 3)["image"], one["image"])
