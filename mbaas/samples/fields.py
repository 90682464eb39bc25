"""Fields: the named, typed values of a sample, such as an image and its label.

A dataset has some fields of a sample without reading it, such as its label; prep makes another from the sample's bytes.
A value is a number or an array. Arrays of a field all have one shape, or differ in their first length, as boxes and
tokens do, or in several, as images of any size. The values of n samples of different lengths are `Packed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

ANNOTATED_SIZE = "annotated_size"
"""Field of a dataset, int32 [2]: height and width of the annotated image; zeros if unknown.

Prep uses it to find the orientation of a photograph with an EXIF orientation."""

Rows: TypeAlias = slice | NDArray[np.intp] | NDArray[np.int64]

_SHORT_BYTES = 1024
"""Up to this mean size, values are copied together, element by element; longer ones one by one."""


class Packed:
    """The concatenated values of n samples that differ in their first k lengths. Indexed by rows like an array.

    Attributes:
        values: [total, *tail], any dtype; may contain further values before and after these samples.
        bounds: int64[n + 1]: sample i has ``values[bounds[i] : bounds[i + 1]]``.
        shapes: int64[n, k], the first lengths of each sample, such as the height and width of an image; their product
            is its number of values. None if samples differ in the first length only, which ``bounds`` gives.
    """

    __slots__ = ("bounds", "shapes", "values")

    def __init__(
        self, values: NDArray[Any], bounds: NDArray[np.int64], shapes: NDArray[np.int64] | None = None
    ) -> None:
        self.values, self.bounds, self.shapes = values, bounds, shapes

    @classmethod
    def closed_up(
        cls, rooms: NDArray[Any], lengths: NDArray[np.int64], shapes: NDArray[np.int64] | None = None
    ) -> Packed:
        """Close the gaps between values in rooms of one size, [n, longest, *tail], each filled from the front.

        In place: ``rooms`` must be contiguous, and is overwritten.
        """
        bounds = bounds_of(lengths)
        values = rooms.reshape(-1, *rooms.shape[2:])
        for row, length in enumerate(lengths.tolist()):
            values[bounds[row] : bounds[row + 1]] = rooms[
                row, :length
            ]  # never overwrites a row that is still to be moved
        return cls(values[: bounds[-1]], bounds, shapes)

    @classmethod
    def within(cls, rooms: NDArray[Any], shapes: NDArray[np.int64]) -> Packed:
        """Lay out samples with these first lengths in the memory of ``rooms``, [n, longest, *tail], without writing
        values.

        ``rooms`` must be contiguous.
        """
        bounds = bounds_of(shapes.prod(axis=1))
        return cls(rooms.reshape(-1, *rooms.shape[2:])[: bounds[-1]], bounds, shapes)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, rows: Rows) -> Packed:
        """Return these samples: for a slice without steps as views, for indices as copies."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            stop = max(start, stop)
            return Packed(
                self.values, self.bounds[start : stop + 1], None if self.shapes is None else self.shapes[start:stop]
            )
        into = self.like(rows)
        self.copy_rows(rows, into, np.arange(len(into)))
        return into

    def value(self, row: int) -> NDArray[Any]:
        """Return the value of one sample, in its own shape, as a view."""
        values = self.values[self.bounds[row] : self.bounds[row + 1]]
        return values if self.shapes is None else values.reshape(*self.shapes[row].tolist(), *values.shape[1:])

    def like(self, rows: Rows) -> Packed:
        """Return a `Packed` with the lengths of ``rows`` and uninitialised values."""
        bounds = bounds_of(self.lengths_of(rows))
        values = np.empty((int(bounds[-1]), *self.values.shape[1:]), self.dtype)
        return Packed(values, bounds, None if self.shapes is None else self.shapes[rows])

    def copy_rows(self, rows: Rows, into: Packed, places: NDArray[np.intp]) -> None:
        """Copy these samples to samples ``places`` of ``into``, which have the same lengths."""
        starts, lengths, targets = self.bounds[:-1][rows], self.lengths_of(rows), into.bounds[places]
        if lengths.sum() * self._item_bytes > _SHORT_BYTES * len(lengths):
            for start, length, target in zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
                into.values[target : target + length] = self.values[start : start + length]
            return
        # The offset of each value in its sample: one copy for all short samples.
        bounds = bounds_of(lengths)
        steps = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        into.values[np.repeat(targets, lengths) + steps] = self.values[np.repeat(starts, lengths) + steps]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[n], the number of values of each sample: the first length, if samples differ only in that one."""
        return cast("NDArray[np.int64]", np.diff(self.bounds))

    def lengths_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the `lengths` of the samples in ``rows``."""
        return self.bounds[1:][rows] - self.bounds[:-1][rows]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def _item_bytes(self) -> int:
        return prod(self.values.shape[1:]) * self.values.itemsize

    @property
    def nbytes(self) -> int:
        """Size in bytes, including bounds and shapes."""
        shapes = 0 if self.shapes is None else self.shapes.nbytes
        return int(self.bounds[-1] - self.bounds[0]) * self._item_bytes + self.bounds.nbytes + shapes

    def own(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return only the values between the first and last bound, and bounds starting at 0."""
        first, end = self.bounds[0], self.bounds[-1]
        return self.values[first:end], self.bounds - first if first else self.bounds

    def copy(self) -> Packed:
        """Return a copy that shares no memory."""
        values, bounds = self.own()
        return Packed(values.copy(), bounds.copy(), None if self.shapes is None else self.shapes.copy())

    def padded(self) -> NDArray[Any]:
        """Return one array, [n, longest, *tail], with shorter samples padded with zeros.

        Only for samples that differ in their first length alone.
        """
        assert self.shapes is None, "see `mbaas.client.convert` for the others"
        values, bounds = self.own()
        lengths = np.diff(bounds)
        out = np.zeros((len(self), int(lengths.max(initial=0)), *values.shape[1:]), values.dtype)
        out[np.arange(out.shape[1]) < lengths[:, None]] = values
        return out


Column: TypeAlias = NDArray[Any] | Packed
"""The values of one field for n samples: [n, *shape], or `Packed`."""

Arrays: TypeAlias = dict[str, Any]
"""The fields of n samples by name, each a `Column`, in the same order of samples. Typed as Any, because most fields are
known to be arrays."""


@dataclass(frozen=True)
class Field:
    """Name, shape and dtype of one field.

    Attributes:
        name: its key in a minibatch.
        shape: of one sample's value; () for a number. Varying first lengths are None.
        dtype: NumPy's name of the element type.
        longest: the greatest first length, if it varies; if several lengths vary, their greatest product, such as the
            most pixels of an image.
        categories: the strings that the values stand for, if they are encoded: 0 for the first, and so on.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    longest: int = 0
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, values: Column) -> Field:
        """Return the field of these values."""
        if isinstance(values, Packed):
            longest = int(values.lengths.max(initial=0))
            differing = 1 if values.shapes is None else values.shapes.shape[1]
            return cls(name, ((None,) * differing) + values.values.shape[1:], values.dtype.name, longest)
        return cls(name, values.shape[1:], values.dtype.name)

    @property
    def text(self) -> str:
        """A readable form: "label: int64", "boxes: float32 [k, 4]", "image: uint8 [h, w, 3]", "kind: one of 3"."""
        return f"{self.name}: " + (f"one of {len(self.categories):,}" if self.categories else self.kind)

    @property
    def kind(self) -> str:
        """Dtype and shape in a readable form: "int64", "float32 [k, 4]"."""
        letters = iter({1: "k", 2: "hw", 3: "khw"}.get(self.differing, ""))
        lengths = ", ".join(next(letters, "any") if length is None else str(length) for length in self.shape)
        return f"{self.dtype} [{lengths}]" if self.shape else self.dtype

    @property
    def differing(self) -> int:
        """The number of varying first lengths: 0 if all have one shape."""
        return self.shape.count(None)

    @property
    def is_packed(self) -> bool:
        """True if values differ in one or more first lengths."""
        return self.shape[:1] == (None,)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """The shape of the largest value, with one length for all varying lengths."""
        fixed = tuple(length for length in self.shape if length is not None)
        return (self.longest, *fixed) if self.is_packed else fixed

    @property
    def nbytes(self) -> int:
        """Size of one sample's value in bytes; the maximum if values differ."""
        # plus a bound, and the lengths if there are several
        beside = self.is_packed + (self.differing if self.differing > 1 else 0)
        return prod(self._lengths) * np.dtype(self.dtype).itemsize + beside * np.dtype(np.int64).itemsize

    def empty(self, rows: int) -> NDArray[Any]:
        """Return an uninitialised array for ``rows`` samples: [rows, *shape], with `longest` for lengths that vary."""
        return np.empty((rows, *self._lengths), self.dtype)

    def zeros(self, rows: int) -> Column:
        """Return zeros for ``rows`` samples, of about the maximum size."""
        values = np.zeros((rows, *self._lengths), self.dtype)
        if not self.is_packed:
            return values
        if self.differing == 1:
            return Packed(values.reshape(-1, *self._lengths[1:]), np.arange(rows + 1) * self.longest)
        # Approximately square; further lengths, such as the number of masks, are 1.
        height = isqrt(self.longest)
        shape = (*(1,) * (self.differing - 2), height, self.longest // max(height, 1))
        return Packed.within(values, np.tile(np.array(shape, np.int64), (rows, 1)))


def value_of(column: Column, row: int) -> NDArray[Any]:
    """Return a view of one sample's value."""
    return column.value(row) if isinstance(column, Packed) else column[row, ...]  # `...` gives an array, even of ()


def memory(column: Column) -> tuple[NDArray[Any], ...]:
    """Return the arrays that hold the values."""
    if not isinstance(column, Packed):
        return (column,)
    return (column.values, column.bounds) + (() if column.shapes is None else (column.shapes,))


def concatenated(columns: Sequence[Column]) -> Column:
    """Return the values of several runs of samples, concatenated, as a copy."""
    if not isinstance(columns[0], Packed):
        return np.concatenate(cast("Sequence[NDArray[Any]]", columns))
    runs = cast("Sequence[Packed]", columns)
    pieces = [run.own() for run in runs]
    lengths = np.concatenate([np.diff(bounds) for _, bounds in pieces])
    values = np.concatenate([values for values, _ in pieces])
    shapes = None if runs[0].shapes is None else np.concatenate([cast("NDArray[np.int64]", run.shapes) for run in runs])
    return Packed(values, bounds_of(lengths), shapes)


def interleaved(pieces: Sequence[tuple[Packed, Rows, NDArray[np.intp]]]) -> Packed:
    """Merge samples of several runs, as a copy. Each piece is (samples, selected rows, their rows in the result).

    Each row of the result must occur exactly once.
    """
    count = sum(len(rows) for _, _, rows in pieces)
    lengths = np.empty(count, np.int64)
    for column, which, rows in pieces:
        lengths[rows] = column.lengths_of(which)
    first, shapes = pieces[0][0], None
    if first.shapes is not None:
        shapes = np.empty((count, first.shapes.shape[1]), np.int64)
        for column, which, rows in pieces:
            shapes[rows] = cast("NDArray[np.int64]", column.shapes)[which]
    bounds = bounds_of(lengths)
    together = Packed(np.empty((int(bounds[-1]), *first.values.shape[1:]), first.dtype), bounds, shapes)
    for column, which, rows in pieces:
        column.copy_rows(which, together, rows)
    return together


def bounds_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the beginning of each of n adjacent runs of values, and the end of the last one: int64[n + 1]."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=bounds[1:])
    return bounds


IMAGE = "image"
"""Name of the field that prep makes from a sample's bytes."""

LABEL = Field("label", (), "int64")
"""The class of a sample, as an index into the class names."""

LABELS = "labels"
"""Name of the field with the classes of the objects in a sample, as indices into the class names."""

SAMPLE_ID = Field("sample_id", (), "int64")
"""The number of a sample in its dataset; a field of every minibatch."""

RESERVED = (SAMPLE_ID.name, "row")
"""Names that minibatches use, so that no other field may have them."""


class BatchTransform(ABC):
    """A random change of each minibatch, for ``batch_fn`` of `mbaas.join` and `tune_integration.get_loader`."""

    # Here, because every trial checks for it, and importing `mbaas.transforms` would delay each trial's start.

    @abstractmethod
    def apply(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the changed minibatch, a function of ``batch`` and ``rng`` alone."""
