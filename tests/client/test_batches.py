"""A block's parts read as one run of rows, and any subset of the rows can be cut."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.client.batches import BatchCutter, BlockView
from mbaas.samples.fields import Arrays, Packed, memory


def part(rows: list[int], *, whole: bool = False) -> dict[str, np.ndarray]:
    """A part whose row r has sample 100 + r."""
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
    """Rows 0, 1, 4, 5 and 6 are chosen from a whole block."""
    block = part(list(range(8)), whole=True)
    view = BlockView([block]).only(np.array([0, 1, 4, 5, 6]))
    taken = view.take(start, stop)
    assert taken["sample_id"].tolist() == [[100, 101, 104, 105, 106][i] for i in range(start, stop)]
    assert np.shares_memory(taken["image"], block["image"]) == is_view


def test_minibatches_of_a_private_block_are_private_and_do_not_overlap():
    block = part(list(range(6)), whole=True)
    cutter = BatchCutter()
    cutter.put(BlockView([block], are_private=True))
    first, second = cutter.cut(2), cutter.cut(2)
    assert all(np.shares_memory(taken["image"], block["image"]) for taken in (first, second)), "not copied again"
    cutter.detach_copy()
    third = cutter.cut(2)
    assert not np.shares_memory(third["image"], block["image"]), "the block can be released"
    for taken in (first, second, third):
        assert all(array.flags.writeable for array in taken.values())
    first["image"][:] = -1
    assert second["image"].tolist() == [[2, 2], [3, 3]]
    assert third["sample_id"].tolist() == [104, 105]


def test_a_run_inside_one_of_several_parts_is_a_view():
    one, two = part([0, 1, 2]), part([3, 4])
    assert np.shares_memory(BlockView([one, two]).take(0, 3)["image"], one["image"])


def shared(arrays: Arrays) -> Arrays:
    """Copy arrays into immutable memory, as Ray returns them."""
    return {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in arrays.items()}


def cutter_of(*parts: Arrays) -> BatchCutter:
    cutter = BatchCutter()
    cutter.put(BlockView(list(parts)))
    return cutter


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [([0, 1, 2, 3], [0, 1, 2, 4]), ([0, 1, 3, 5], [0, 1, 4, 7]), ([0, 1, 4], [0, 1, 5])],
    ids=["side by side in both parts", "apart in the second", "apart in the first"],
)
def test_a_minibatch_of_two_parts_is_in_memory_of_its_own_that_can_be_written(chosen, rows):
    one, two = shared(part([1, 4, 5])), shared(part([0, 2, 7]))
    taken = BlockView([one, two]).only(np.array(chosen)).take(0, len(rows))
    assert taken["image"].tolist() == [[row, row] for row in rows]
    assert taken["sample_id"].tolist() == [100 + row for row in rows]
    assert all(array.flags.writeable and array.flags.owndata for array in taken.values())
    assert not any(np.shares_memory(taken["image"], each["image"]) for each in (one, two))


def test_a_view_of_a_part_refuses_to_be_written_whatever_the_part_was():
    """The second part is writable although readers share it, like an array sent inside a message."""
    for one in (shared(part([0, 1, 2])), part([0, 1, 2])):
        image = cutter_of(one).cut(2)["image"]
        assert np.shares_memory(image, one["image"])
        with pytest.raises(ValueError, match="read-only"):
            image[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            image.flags.writeable = True


def test_a_minibatch_across_blocks_is_in_memory_of_its_own_and_leaves_the_blocks_alone():
    one, two = shared(part([0, 1, 2], whole=True)), shared(part([3, 4], whole=True))
    cutter = cutter_of(one)
    cutter.cut(2)
    cutter.detach_copy()
    cutter.put(BlockView([two]))
    got = cutter.cut(3)
    assert got["sample_id"].tolist() == [102, 103, 104]
    assert all(array.flags.writeable for array in got.values())
    assert not any(np.shares_memory(got["image"], each["image"]) for each in (one, two))


def test_what_is_left_is_copied_once_and_holds_no_block(monkeypatch):
    one, two = shared(part([1, 4, 5])), shared(part([0, 2, 7]))
    made = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *given, **named: made.append(empty(*given, **named)) or made[-1])
    cutter = cutter_of(one, two)
    cutter.cut(2)
    made.clear()
    cutter.detach_copy()
    left = cutter.cut(4)
    assert left["sample_id"].tolist() == [102, 104, 105, 107]
    assert any(np.shares_memory(left["image"], array) for array in made), "it was copied again"
    assert not any(np.shares_memory(left["image"], each["image"]) for each in (one, two))


def test_what_is_left_of_a_block_of_one_part_holds_it_no_more():
    block = shared(part([0, 1, 2], whole=True))
    cutter = cutter_of(block)
    cutter.cut(1)
    cutter.detach_copy()
    left = cutter.cut(2)
    assert left["sample_id"].tolist() == [101, 102]
    assert not np.shares_memory(left["image"], block["image"])


def boxes_of(rows: list[int]) -> Packed:
    """Sample 100 + r has r % 3 boxes, and all their numbers are r."""
    lengths = np.array(rows, np.int64) % 3
    values = np.repeat(np.array(rows, np.float32), lengths)[:, None] * np.ones(4, np.float32)
    return Packed(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def images_of(rows: list[int]) -> Packed:
    """Sample 100 + r has an image of (1 + r % 3) x (2 + r % 4) pixels of value r."""
    sizes = np.stack([1 + np.array(rows, np.int64) % 3, 2 + np.array(rows, np.int64) % 4], axis=1)
    values = np.repeat(np.array(rows, np.uint8), sizes.prod(axis=1))[:, None] * np.ones(3, np.uint8)
    return Packed(values, np.concatenate([[0], np.cumsum(sizes.prod(axis=1))]).astype(np.int64), sizes)


def test_values_that_differ_in_length_go_with_their_samples():
    """Rows are cut from two interleaved parts, from one part, and across blocks. Shared values are read-only."""
    parts = [part(rows) | {"boxes": boxes_of(rows), "sized": images_of(rows)} for rows in ([1, 4, 5], [0, 2, 7])]
    whole = part([8, 9, 10], whole=True) | {"boxes": boxes_of([8, 9, 10]), "sized": images_of([8, 9, 10])}
    cutter = cutter_of(*parts)
    cutter.put(BlockView([whole]).only(np.array([0, 2])))
    cutter.put(BlockView([whole]))
    for size, rows in ((2, [0, 1]), (3, [2, 4, 5]), (3, [7, 8, 10]), (2, [8, 9]), (1, [10])):
        taken = cutter.cut(size)
        assert taken["sample_id"].tolist() == [100 + row for row in rows]
        boxes, wanted = taken["boxes"].own(), boxes_of(rows)
        np.testing.assert_array_equal(boxes[0], wanted.values)
        assert boxes[1].tolist() == wanted.bounds.tolist()
        assert taken["boxes"].values.flags.writeable == taken["image"].flags.writeable
        for row, wanted in zip(range(size), (images_of([row]).value(0) for row in rows), strict=True):
            np.testing.assert_array_equal(taken["sized"].value(row), wanted)
        of_image = {array.flags.writeable for array in memory(taken["sized"])}
        assert of_image == {taken["image"].flags.writeable}


def test_what_is_left_of_a_block_is_copied_with_values_that_differ_in_length():
    whole = part([3, 4, 5], whole=True) | {"boxes": boxes_of([3, 4, 5])}
    cutter = cutter_of(whole)
    cutter.cut(1)
    cutter.detach_copy()
    taken = cutter.cut(2)
    assert taken["boxes"].own()[1].tolist() == [0, 1, 3]
    assert not np.shares_memory(taken["boxes"].values, whole["boxes"].values)
