"""What becomes of the samples of a block that are no images: each is made in its row, or is bad."""

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
    """The results of n samples. Threads may share it, each for other samples.

    Args:
        out: [n, *shape], where they are made; see `Engine.prepare`.
        differing: in how many of their first lengths they differ, which are one in ``out``: each row has room for the
            greatest product of these; 0 if all have one shape.

    Attributes:
        bad: those that could not be prepared so far, in any order.
    """

    def __init__(self, out: Array, differing: int) -> None:
        self.bad: list[BadRow] = []
        self._out, self._differing = out, differing
        self._shapes = np.zeros((len(out), differing), np.int64)

    @contextmanager
    def judged(self, row: int, keep: KeptRows | None = None) -> Iterator[None]:
        """Make a sample bad that cannot be decoded, does not fit a transform, or has no place in its row; of such a one
        nothing is kept.
        """
        try:
            yield
        except (UndecodableError, UnfitError) as error:
            self.bad.append(BadRow(row, str(error)))
            if keep is not None:
                keep.drop(row)

    def put(self, row: int, sample: Array) -> None:
        """Copy a sample to its row.

        Raises:
            UndecodableError: it does not fit.
        """
        room = self._out[row, ...]  # an array, also of one number
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
        """Zero the rows of bad samples, and return them in order, with the fields of the good ones.

        Args:
            known: the fields of all samples.
        """
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
    """Return the first places of a row, as many as a sample has, in the shape of its first lengths."""
    first = sample.shape[:differing]
    count = math.prod(first)
    if len(first) == differing and count <= len(row):
        return row[:count].reshape(*first, *row.shape[1:])
    must = f"and must have the {differing} lengths in which samples differ"
    if differing == 1 or len(first) == differing:
        of = "its first length" if differing == 1 else f"the product of its first {differing} lengths"
        must = f"and {of} must be at most {len(row):,}"
    raise UndecodableError(f"it is prepared to {sample.dtype.name} {list(sample.shape)}, {must}")
