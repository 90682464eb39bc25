"""What becomes of the samples of a block that are no images: each is made in its row, or is bad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Arrays, Column, Packed
from mbaas.prep.engine import BadRow, Prepared
from mbaas.prep.header import UndecodableError
from mbaas.transforms.arrays import UnfitError

Array = NDArray[Any]


class ArrayResults:
    """The results of n samples. Threads may share it, each for other samples.

    Args:
        out: [n, *shape], where they are made; see `Engine.prepare`.
        differs: whether they differ in their first length; each row of ``out`` has room for the longest then.

    Attributes:
        bad: those that could not be prepared so far, in any order.
    """

    def __init__(self, out: Array, *, differs: bool) -> None:
        self.bad: list[BadRow] = []
        self._out, self._differs = out, differs
        self._lengths = np.zeros(len(out), np.int64)

    @contextmanager
    def judged(self, row: int) -> Iterator[None]:
        """Make a sample bad that cannot be decoded, does not fit a transform, or has no place in its row."""
        try:
            yield
        except (UndecodableError, UnfitError) as error:
            self.bad.append(BadRow(row, str(error)))

    def put(self, row: int, sample: Array) -> None:
        """Copy a sample to its row.

        Raises:
            UndecodableError: it does not fit.
        """
        room = self._out[row, ...]  # an array, also of one number
        into = _beginning(sample, room) if self._differs else room
        if (sample.shape, sample.dtype) != (into.shape, into.dtype):
            got, wanted = (f"{each.dtype.name} {list(each.shape)}" for each in (sample, into))
            raise UndecodableError(
                f"it is prepared to {got}, but the samples of this feed are {wanted}; a RandomCrop or a CropOrPad in "
                "the pipeline gives all the same lengths"
            )
        np.copyto(into, sample)
        if self._differs:
            self._lengths[row] = len(into)

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
        made: Column = Packed.closed_up(self._out, self._lengths) if self._differs else self._out
        return Prepared(bad, known, made)


def _beginning(sample: Array, room: Array) -> Array:
    """Return the first places of a row, as many as a sample has."""
    if not sample.ndim or len(sample) > len(room):
        got = f"{sample.dtype.name} {list(sample.shape)}"
        raise UndecodableError(f"it is prepared to {got}, and its first length must be at most {len(room):,}")
    return room[: len(sample)]
