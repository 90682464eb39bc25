"""Values that differ in length, as one run of rows: a list of arrays says what is right."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.fields import Field, Packed, concatenated

LENGTHS = st.lists(st.integers(0, 4), max_size=8)


def packed(lengths: list[int], first: int = 0, tail: tuple[int, ...] = (2,)) -> Packed:
    """Sample i has ``lengths[i]`` rows, no two of which are alike."""
    total = sum(lengths)
    values = first + np.arange(total * int(np.prod(tail)), dtype=np.int32).reshape(total, *tail)
    return Packed(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def listed(column: Any) -> list[list[Any]]:
    """The values of each sample."""
    values, bounds = column.own()
    assert bounds[0] == 0
    assert len(values) == bounds[-1]
    return [values[start:stop].tolist() for start, stop in pairwise(bounds)]


@given(LENGTHS, st.integers(0, 9), st.integers(0, 9))
def test_a_slice_is_a_view_of_the_samples_between(lengths: list[int], start: int, stop: int) -> None:
    column = packed(lengths)
    part = column[start:stop]
    assert listed(part) == listed(column)[start:stop]
    assert part.values is column.values
    assert len(part) == len(listed(part))
    assert part.lengths.tolist() == lengths[start:stop]
    assert part.nbytes == sum(lengths[start:stop]) * 8 + (len(part) + 1) * 8


@given(LENGTHS, st.data())
def test_rows_that_are_chosen_by_their_numbers_are_copies(lengths: list[int], data: st.DataObject) -> None:
    column = packed([3, *lengths])[1:]
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)) if lengths else []
    chosen = column[np.array(rows, np.int64)]
    assert listed(chosen) == [listed(column)[row] for row in rows]
    assert not np.shares_memory(chosen.values, column.values)


@given(LENGTHS, st.sampled_from([(), (2,), (2, 3)]))
def test_values_in_rooms_of_one_size_are_moved_together_in_place(lengths: list[int], tail: tuple[int, ...]) -> None:
    wanted = packed(lengths, tail=tail)
    rooms = Field("f", (None, *tail), "int32", longest=4).empty(len(lengths))
    assert rooms.shape == (len(lengths), 4, *tail)
    rooms[:] = -1
    for row, (start, end) in enumerate(pairwise(wanted.bounds.tolist())):
        rooms[row, : end - start] = wanted.values[start:end]
    column = Packed.closed_up(rooms, np.array(lengths, np.int64))
    assert listed(column) == listed(wanted)
    assert len(column.values) == sum(lengths), "no more than these values travels"
    assert not len(column.values) or np.shares_memory(column.values, rooms)


@given(st.lists(LENGTHS, min_size=1, max_size=4))
def test_runs_of_samples_are_put_one_after_the_other(runs: list[list[int]]) -> None:
    columns = [packed([2, *lengths], first=100 * number)[1:] for number, lengths in enumerate(runs)]
    assert listed(concatenated(columns)) == [value for column in columns for value in listed(column)]


@given(LENGTHS, st.sampled_from([(), (2,), (2, 3)]))
def test_what_is_shorter_is_filled_up_with_zeros(lengths: list[int], tail: tuple[int, ...]) -> None:
    column = packed([1, *lengths], first=1, tail=tail)[1:]
    padded = column.padded()
    assert padded.shape == (len(lengths), max(lengths, default=0), *tail)
    for row, values in enumerate(listed(column)):
        assert padded[row, : len(values)].tolist() == values
        assert not padded[row, len(values) :].any()


def test_a_copy_holds_its_own_samples_alone() -> None:
    part = packed([3, 1, 2])[1:]
    copied = part.copy()
    assert (listed(copied), len(copied.values)) == (listed(part), 3)
    assert copied.values.flags.writeable
    assert listed(pickle.loads(pickle.dumps(part, protocol=5))) == listed(part)


@pytest.mark.parametrize(
    ("values", "field", "nbytes"),
    [
        (np.zeros((5, 3), np.float32), Field("f", (3,), "float32"), 12),
        (np.zeros(5, np.uint8), Field("f", (), "uint8"), 1),
        (packed([3, 0, 4]), Field("f", (None, 2), "int32", 4), 4 * 8 + 8),
        (packed([0, 0], tail=()), Field("f", (None,), "int32", 0), 8),
    ],
)
def test_a_field_is_known_by_its_values(values: Any, field: Field, nbytes: int) -> None:
    assert Field.of("f", values) == field
    assert field.nbytes == nbytes
    zeros = field.zeros(3)
    assert (len(zeros), Field.of("f", zeros)) == (3, field)
    assert zeros.nbytes <= 3 * nbytes + 8
