"""Memory for the prepared samples of a block, and the samples of the block that cannot be prepared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import BadRow, Prepared
from mbaas.samples.fields import Arrays, Column, Packed
from mbaas.transforms import Pipeline
from mbaas.transforms.arrays import UnfitError

Array = NDArray[Any]


class _Texts(NamedTuple):
    """Words for samples of one kind: their varying axes, what these count, its limit, and how all become equal."""

    axes: tuple[str, ...]
    unit: str
    limit: str
    remedy: str


_IMAGES = _Texts(
    ("height", "width"),
    "pixels",
    " (DecodeImage's max_pixels); a Resize in the pipeline makes images smaller",
    "a Resize, a CenterCrop or a RandomResizedCrop in the pipeline gives all the same size, and DecodeImage's "
    "max_pixels lets them differ",
)
_ARRAYS = _Texts(("any",) * 32, "values", "", "a RandomCrop or a CropOrPad in the pipeline gives all the same lengths")


class Results:
    """The results of n samples. Threads may work on different samples at the same time.

    Args:
        out: [n, *shape], memory for the results; see `mbaas.prep.engines.Engine.prepare`. Leading axes whose lengths
            vary (`Pipeline.differing`) are one axis, long enough for their largest product.
        keep: receives decoded samples; those of bad samples are dropped.

    Attributes:
        bad: row -> reason why the sample cannot be prepared.
        column: the results, if their sizes are known; None before `finish` if the samples' own sizes decide.
    """

    def __init__(self, out: Array, pipeline: Pipeline, keep: DecodedRows | None) -> None:
        differing, texts = pipeline.differing, _IMAGES if pipeline.has_images else _ARRAYS
        self.bad: dict[int, str] = {}
        self.keep = DecodedRows((), 0) if keep is None else keep
        self.column: Column | None = None if differing else out
        self._out, self._differing, self._texts = out, differing, texts
        self._shapes = np.zeros((len(out), differing), np.int64)
        wanted = (*texts.axes[:differing], *out.shape[2 if differing else 1 :])
        self._wanted = f"{out.dtype.name} [{', '.join(map(str, wanted))}]"

    @property
    def good(self) -> NDArray[np.bool_]:
        """bool[n], False for bad samples."""
        return ~np.isin(np.arange(len(self._out)), [*self.bad])

    def lay_out(self, shapes: NDArray[np.int64]) -> None:
        """Place samples whose lengths that vary are known before, int64[n, differing], directly end to end."""
        self.column = Packed.within(self._out, shapes)

    def at(self, row: int) -> Array | None:
        """Return memory of the sample's shape, to prepare it in place; None if the shape is not known yet."""
        return None if self.column is None else value_of(self.column, row)

    def attempt(self, row: int, work: Callable[..., object], *given: Any) -> bool:
        """Return whether ``work(*given)`` succeeds for a sample; otherwise the sample is bad."""
        try:
            work(*given)
        except UnfitError as error:
            self.bad[row] = str(error)
            self.keep.drop(row)
            return False
        return True

    def put(self, row: int, sample: Array, made_in: Array | None = None) -> None:
        """Copy a sample to its memory, unless that is ``made_in``, its own; raise UnfitError if it does not fit."""
        if sample is made_in:
            return
        into, lengths = self.at(row), sample.shape[: self._differing]
        if into is None and len(lengths) == self._differing:
            self.check_size(lengths)
            into = self._out[row, : math.prod(lengths)].reshape(*lengths, *self._out.shape[2:])
        if into is None or (sample.shape, sample.dtype) != (into.shape, into.dtype):
            raise UnfitError(
                f"it is prepared to {described(sample)}, but the samples of this feed are {self._wanted}; "
                f"{self._texts.remedy}"
            )
        np.copyto(into, sample)
        self._shapes[row] = lengths

    def check_size(self, lengths: Sequence[int]) -> None:
        """Raise UnfitError if a sample with these varying lengths is too large."""
        values, most = math.prod(lengths), self._out.shape[1]
        if values > most:
            size, limit = "x".join(map(str, reversed(lengths))), f"over the limit of {most:,}{self._texts.limit}"
            raise UnfitError(f"it is prepared to {size}, which is {values:,} {self._texts.unit}, {limit}")

    def finish(self, known: Arrays) -> Prepared:
        """Zero the bad samples; return them in order, with the fields of the good samples out of ``known``."""
        made = self.column
        if made is None:
            shapes = self._shapes if self._differing > 1 else None
            made = Packed.closed_up(self._out, self._shapes.prod(axis=1), shapes)
        if not self.bad:
            return Prepared([], known, made)
        # An engine may have partly written a row before it failed; the content of bad rows must not depend on the
        # engine.
        for row in self.bad:
            value_of(made, row)[...] = 0
        good = np.flatnonzero(self.good)
        bad = [BadRow(row, reason) for row, reason in sorted(self.bad.items())]
        return Prepared(bad, {name: column[good] for name, column in known.items()}, made)


def value_of(column: Column, row: int) -> Array:
    """Return a view of one sample's value."""
    return column.value(row) if isinstance(column, Packed) else column[row, ...]  # `...` gives an array, even of ()


def described(array: Array) -> str:
    """Return an array's dtype and shape, such as "uint8 [480, 640, 3]"."""
    return f"{array.dtype.name} {list(array.shape)}"
