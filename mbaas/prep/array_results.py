"""Collects the results of a block of samples other than images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays, Column, Packed
from mbaas.prep.decoded import KeptRows
from mbaas.prep.engine import BadRow, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.transforms.arrays import UnfitError

Array = NDArray[Any]


class ArrayResults:
    """The results of n samples. Threads may put different samples at the same time.

    Args:
        out: [n, *shape], memory for the results; see `Engine.prepare`.
        differing: number of leading axes whose lengths vary; they are one axis in ``out``, long enough for their
            largest product. 0 if all samples have the same shape.

    Attributes:
        bad: samples that could not be prepared so far, in any order.
    """

    def __init__(self, out: Array, differing: int) -> None:
        self.bad: list[BadRow] = []
        self._out, self._differing = out, differing
        self._shapes = np.zeros((len(out), differing), np.int64)

    @contextmanager
    def judged(self, row: int, keep: KeptRows | None = None) -> Iterator[None]:
        """Record a sample as bad, and drop its decoded form, if it cannot be decoded, transformed or stored."""
        try:
            yield
        except (UndecodableError, UnfitError) as error:
            self.bad.append(BadRow(row, str(error)))
            if keep is not None:
                keep.drop(row)

    def put(self, row: int, sample: Array) -> None:
        """Copy a sample to its row; raise UndecodableError if it does not fit."""
        room = self._out[row, ...]  # `...` gives an array, even for a scalar
        into = _room_for(sample, room, self._differing) if self._differing else room
        if (sample.shape, sample.dtype) != (into.shape, into.dtype):
            got, wanted = (f"{each.dtype.name} {list(each.shape)}" for each in (sample, into))
            raise UndecodableError(
                f"it is prepared to {got}, but the samples of this feed are {wanted}; a RandomCrop or a CropOrPad in "
                "the pipeline gives all the same lengths"
            )
        np.copyto(into, sample)
        self._shapes[row] = into.shape[: self._differing]

    def finish(self, known: Arrays) -> Prepared:
        """Zero the rows of bad samples; return them in order, with the fields of the good samples out of ``known``."""
        bad = sorted(self.bad, key=lambda each: each.row)
        if bad:
            rows = [each.row for each in bad]
            self._out[rows] = 0
            good = np.setdiff1d(np.arange(len(self._out)), rows)
            known = {name: column[good] for name, column in known.items()}
        return Prepared(bad, known, self._made())

    def _made(self) -> Column:
        if not self._differing:
            return self._out
        return Packed.closed_up(self._out, self._shapes.prod(axis=1), self._shapes if self._differing > 1 else None)


def _room_for(sample: Array, row: Array, differing: int) -> Array:
    """Return the leading part of a row that a sample needs, in the sample's shape."""
    first = sample.shape[:differing]
    count = math.prod(first)
    if len(first) == differing and count <= len(row):
        return row[:count].reshape(*first, *row.shape[1:])
    must = f"and must have the {differing} lengths in which samples differ"
    if differing == 1 or len(first) == differing:
        of = "its first length" if differing == 1 else f"the product of its first {differing} lengths"
        must = f"and {of} must be at most {len(row):,}"
    raise UndecodableError(f"it is prepared to {sample.dtype.name} {list(sample.shape)}, {must}")
