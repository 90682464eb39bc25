"""A node sends each rank its rows of parts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray

from mbaas.cache.row_server import RowPool, check_pick, part_rows
from mbaas.errors import ConfigError
from mbaas.samples.fields import Packed


def part(rows: list[int], *, whole: bool = False) -> dict[str, np.ndarray]:
    ids = np.array(rows, np.int64)
    arrays = {"image": np.full((len(ids), 300, 300), ids[:, None, None], np.uint8), "sample_id": ids + 100}
    return arrays if whole else {**arrays, "row": ids}


def test_rows_of_each_part_come_as_a_smaller_part():
    """Parts of 6 rows and one without requested rows. A row has 90 kB, so a thread copies 11 at a time."""
    parts = [part(list(range(0, 60, 2))), part([1, 3, 9]), part([61])]
    for one in parts:  # sample r has r % 3 boxes
        lengths = one["row"] % 3
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        one["boxes"] = Packed(np.repeat(one["row"], lengths), bounds)
        # ... and an image of 1 to 3 rows of 100 kB, so that threads copy few at a time
        sizes = np.stack([1 + lengths, np.full(len(lengths), 100_000)], axis=1)
        pixels = np.repeat(one["row"].astype(np.uint8), sizes.prod(axis=1))
        one["sized"] = Packed(pixels, np.concatenate([[0], np.cumsum(sizes.prod(axis=1))]), sizes)
    rows, pool = np.array([0, 3, 8, *range(20, 50)]), RowPool(threads=2)
    try:
        got = asyncio.run(pool.pick(parts, rows, np.empty(0, np.int64)))
    finally:
        pool.close()
    assert [one["row"].tolist() for one in got] == [[0, 8, *range(20, 50, 2)], [3], []]
    for one in got:
        assert (one["sample_id"] == one["row"] + 100).all()
        assert (one["image"] == one["row"].astype(np.uint8)[:, None, None]).all()
        values, bounds = one["boxes"].own()
        assert values.tolist() == np.repeat(one["row"], one["row"] % 3).tolist()
        assert np.diff(bounds).tolist() == (one["row"] % 3).tolist()
        for number, row in enumerate(one["row"].tolist()):
            image = one["sized"].value(number)
            assert (image.shape, np.unique(image).tolist()) == ((1 + row % 3, 100_000), [row])


def test_a_whole_block_without_its_bad_rows():
    """Rows 2 and 4 of 6 were bad, so the entries are rows 0, 1, 3, 5."""
    block = part([0, 1, 3, 5], whole=True)
    assert part_rows(block, np.array([2, 4])).tolist() == [0, 1, 3, 5]
    pool = RowPool(threads=1)
    try:
        (got,) = asyncio.run(pool.pick([block], np.array([1, 5]), np.array([2, 4])))
    finally:
        pool.close()
    assert got["row"].tolist() == [1, 5]
    assert got["sample_id"].tolist() == [101, 105]


def asked(**changed: object) -> dict[str, object]:
    """A rank's request to a node for a block of 8 rows, with some values changed."""
    rows = np.array([0, 3, 7])
    return {"part_refs": [ray.ObjectRef.from_random()], "rows": rows, "bad_rows": np.array([5]), **changed}


@pytest.mark.parametrize("changed", [{}, {"rows": np.empty(0, np.int64)}, {"bad_rows": np.arange(8)}])
def test_what_ranks_ask_for_is_let_in(changed):
    check_pick(**asked(**changed), most=8)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"part_refs": []}, r"part_refs must be a list of 1 to 10000 references, got \[\]"),
        ({"part_refs": None}, "part_refs must be a list of 1 to 10000 references, got None"),
        ({"part_refs": [3]}, "part_refs must hold references to parts of a block, got 3"),
        ({"rows": [0, 3]}, r"rows must be an array int64\[k\], got \[0, 3\]"),
        ({"rows": np.array([0.0, 3.0])}, r"rows must be an array int64\[k\], got float64\[2\]"),
        ({"rows": np.array([[0, 3]])}, r"rows must be an array int64\[k\], got int64\[1, 2\]"),
        ({"rows": np.array([0, 8])}, r"rows must be in \[0, 7\], got 0 to 8"),
        ({"bad_rows": np.array([-1, 3])}, r"bad_rows must be in \[0, 7\], got -1 to 3"),
        ({"rows": np.array([0, 5, 3])}, "rows must be ascending, got 5 before 3"),
        ({"bad_rows": np.array([2, 2])}, "bad_rows must be ascending, got 2 before 2"),
    ],
)
def test_what_no_rank_can_ask_for_is_an_error_of_the_rank(changed, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        check_pick(**asked(**changed), most=8)
