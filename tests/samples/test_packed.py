"""Packed values of unequal length behave as a list of arrays does."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.samples.fields import Field, Packed, concatenated, interleaved, memory

LENGTHS = st.lists(st.integers(0, 4), max_size=8)
SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)
PIXELS = st.sampled_from([2, 400])
"""Numbers in a pixel: a few, which are copied all at once, and many."""


def packed(lengths: list[int], first: int = 0, tail: tuple[int, ...] = (2,)) -> Packed:
    """A column with ``lengths[i]`` rows in sample i, all different."""
    total = sum(lengths)
    values = first + np.arange(total * int(np.prod(tail)), dtype=np.int32).reshape(total, *tail)
    return Packed(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def pictures(sizes: list[tuple[int, int]], first: int = 0, pixel: int = 2) -> Packed:
    """A column with ``sizes[i]`` pixels of ``pixel`` numbers in sample i, all different."""
    total = sum(height * width for height, width in sizes)
    values = first + np.arange(total * pixel, dtype=np.int32).reshape(total, pixel)
    bounds = np.cumsum([0, *(height * width for height, width in sizes)], dtype=np.int64)
    return Packed(values, bounds, np.array(sizes, np.int64).reshape(-1, 2))


def shown(column: Packed) -> list[list[Any]]:
    """The value of each sample, in its shape."""
    return [column.value(row).tolist() for row in range(len(column))]


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
    assert len(column.values) == sum(lengths), "only these values are sent"
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


@given(SIZES, PIXELS, st.data())
def test_samples_of_any_size_are_chosen_like_rows(
    sizes: list[tuple[int, int]], pixel: int, data: st.DataObject
) -> None:
    column = pictures([(2, 3), *sizes], pixel=pixel)[1:]
    wanted = shown(column)
    assert [column.value(row).shape for row in range(len(column))] == [(*size, pixel) for size in sizes]
    start, stop = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    part = column[start:stop]
    assert shown(part) == wanted[start:stop]
    assert part.values is column.values
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8)) if sizes else []
    chosen = column[np.array(rows, np.int64)]
    assert shown(chosen) == [wanted[row] for row in rows]
    assert len(chosen.values) == sum(chosen.lengths)
    assert not np.shares_memory(chosen.values, column.values)
    assert shown(part.copy()) == shown(part)
    assert chosen.nbytes == sum(array.nbytes for array in memory(chosen))


@given(st.lists(st.one_of(SIZES), min_size=1, max_size=3), PIXELS, st.randoms())
def test_runs_of_samples_of_any_size_are_put_together_in_any_order(
    runs: list[list[tuple[int, int]]], pixel: int, chance: Any
) -> None:
    columns = [pictures([(1, 2), *sizes], first=100_000 * n, pixel=pixel)[1:] for n, sizes in enumerate(runs)]
    in_turn = [value for column in columns for value in shown(column)]
    together = concatenated(columns)
    assert isinstance(together, Packed)
    assert shown(together) == in_turn
    places = np.array(chance.sample(range(len(in_turn)), len(in_turn)), np.int64)
    cuts = np.split(places, np.cumsum([len(sizes) for sizes in runs])[:-1])
    mixed = interleaved([(c, np.arange(len(c)), rows) for c, rows in zip(columns, cuts, strict=True)])
    assert shown(mixed) == [in_turn[int(at)] for at in np.argsort(places)]


@given(SIZES)
def test_samples_of_any_size_lie_end_to_end_in_rooms_for_the_largest(sizes: list[tuple[int, int]]) -> None:
    wanted, field = pictures(sizes), Field("f", (None, None, 2), "int32", longest=16)
    rooms = field.empty(len(sizes))
    assert rooms.shape == (len(sizes), 16, 2)
    assert wanted.shapes is not None
    laid_out = Packed.within(rooms, wanted.shapes)
    laid_out.values[...] = wanted.values
    assert shown(laid_out) == shown(wanted)
    for row, length in enumerate(wanted.lengths.tolist()):
        rooms[row, :length] = wanted.value(row).reshape(-1, 2)
    assert shown(Packed.closed_up(rooms, wanted.lengths, wanted.shapes)) == shown(wanted)


def test_a_copy_holds_its_own_samples_alone() -> None:
    part = packed([3, 1, 2])[1:]
    copied = part.copy()
    assert (listed(copied), len(copied.values)) == (listed(part), 3)
    assert copied.values.flags.writeable
    assert listed(pickle.loads(pickle.dumps(part, protocol=5))) == listed(part)
    sized = pictures([(2, 3), (1, 4)])[1:]
    assert shown(pickle.loads(pickle.dumps(sized, protocol=5))) == shown(sized)


@pytest.mark.parametrize(
    ("values", "field", "nbytes"),
    [
        (np.zeros((5, 3), np.float32), Field("f", (3,), "float32"), 12),
        (np.zeros(5, np.uint8), Field("f", (), "uint8"), 1),
        (packed([3, 0, 4]), Field("f", (None, 2), "int32", 4), 4 * 8 + 8),
        (packed([0, 0], tail=()), Field("f", (None,), "int32", 0), 8),
        (pictures([(2, 3), (4, 4)]), Field("f", (None, None, 2), "int32", 16), 16 * 8 + 3 * 8),
    ],
)
def test_a_field_is_known_by_its_values(values: Any, field: Field, nbytes: int) -> None:
    assert Field.of("f", values) == field
    assert field.nbytes == nbytes
    zeros = field.zeros(3)
    assert (len(zeros), Field.of("f", zeros)) == (3, field)
    assert zeros.nbytes <= 3 * nbytes + 8


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((), "int64"),
        ((2, 3), "int64 [2, 3]"),
        ((None, 4), "int64 [k, 4]"),
        ((None, None, 3), "int64 [h, w, 3]"),
        ((None,) * 3, "int64 [k, h, w]"),
        ((None,) * 4, "int64 [any, any, any, any]"),
    ],
)
def test_the_kind_of_a_field_names_the_lengths_that_differ(shape: tuple[int | None, ...], kind: str) -> None:
    assert Field("it", shape, "int64").kind == kind
