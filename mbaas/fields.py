"""Fields: the named, typed values of which a sample consists.

An image and its label are the usual ones. A dataset knows some fields of a sample without reading it, such as its
label; prep makes another one of its bytes. A value is a number or an array. Arrays of a field all have one shape, or
differ in their first length, as boxes and tokens do; the values of n samples are then `Packed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = slice | NDArray[np.intp] | NDArray[np.int64]


class Packed:
    """The values of n samples whose first lengths differ, end to end. Indexed by rows as an array is.

    Attributes:
        values: [total, *tail], any dtype; there may be more of them before and behind these samples.
        bounds: int64[n + 1]: sample i has ``values[bounds[i] : bounds[i + 1]]``.
    """

    __slots__ = ("bounds", "values")

    def __init__(self, values: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        self.values, self.bounds = values, bounds

    @classmethod
    def closed_up(cls, rooms: NDArray[Any], lengths: NDArray[np.int64]) -> Packed:
        """Move values together that lie in rooms of one size: [n, longest, *tail], of each sample the first ones.

        In place, in the memory of ``rooms``, which is contiguous and holds something else afterwards.
        """
        bounds = _bounds_of(lengths)
        values = rooms.reshape(-1, *rooms.shape[2:])
        for row, length in enumerate(lengths.tolist()):
            values[bounds[row] : bounds[row + 1]] = rooms[row, :length]  # never before what was moved already
        return cls(values[: bounds[-1]], bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, rows: Rows) -> Packed:
        """Return these samples: for a slice without steps as views, for indices as copies."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return Packed(self.values, self.bounds[start : max(start, stop) + 1])
        starts, lengths = self.bounds[:-1][rows], self.lengths[rows]
        bounds = _bounds_of(lengths)
        # For each value its place: that of its sample's first one, and how many of them come before it.
        places = np.repeat(starts - bounds[:-1], lengths) + np.arange(bounds[-1])
        return Packed(self.values[places], bounds)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[n], the first length of each."""
        return cast("NDArray[np.int64]", np.diff(self.bounds))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values' elements."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes of these samples and their bounds."""
        item = prod(self.values.shape[1:]) * self.values.itemsize
        return int(self.bounds[-1] - self.bounds[0]) * item + self.bounds.nbytes

    def own(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the values of these samples alone, and their bounds in them, which begin with 0."""
        first, end = self.bounds[0], self.bounds[-1]
        return self.values[first:end], self.bounds - first if first else self.bounds

    def copy(self) -> Packed:
        """Return a copy that shares no memory."""
        values, bounds = self.own()
        return Packed(values.copy(), bounds.copy())

    def padded(self) -> NDArray[Any]:
        """Return all in one array, [n, longest, *tail], with zeros behind what is shorter."""
        values, bounds = self.own()
        lengths = np.diff(bounds)
        out = np.zeros((len(self), int(lengths.max(initial=0)), *values.shape[1:]), values.dtype)
        out[np.arange(out.shape[1]) < lengths[:, None]] = values
        return out


Column: TypeAlias = NDArray[Any] | Packed
"""The values of one field for n samples: [n, *shape], or `Packed`."""

Arrays: TypeAlias = dict[str, Any]
"""The fields of n samples by name, each a `Column`, in the same order of samples. (Not so for the type checker: most
fields are known to be arrays.)"""


@dataclass(frozen=True)
class Field:
    """What the values of one field look like.

    Attributes:
        name: under which a minibatch has them.
        shape: of one sample's value; () for a number. The first length is None if values differ in it.
        dtype: NumPy's name of the element type.
        longest: the greatest first length, if they differ in it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    longest: int = 0

    @classmethod
    def of(cls, name: str, values: Column) -> Field:
        """Return the field that has these values."""
        if isinstance(values, Packed):
            longest = int(values.lengths.max(initial=0))
            return cls(name, (None, *values.values.shape[1:]), values.dtype.name, longest)
        return cls(name, values.shape[1:], values.dtype.name)

    @property
    def text(self) -> str:
        """The field in words: "label: int64", "boxes: float32 [k, 4]"."""
        lengths = ", ".join("k" if length is None else str(length) for length in self.shape)
        return f"{self.name}: {self.dtype}" + (f" [{lengths}]" if self.shape else "")

    @property
    def is_packed(self) -> bool:
        """Whether values differ in their first length."""
        return self.shape[:1] == (None,)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """The shape of the largest value."""
        return tuple(self.longest if length is None else length for length in self.shape)

    @property
    def nbytes(self) -> int:
        """Size of one sample's value in bytes; the most, if they differ."""
        bound = np.dtype(np.int64).itemsize if self.is_packed else 0
        return prod(self._lengths) * np.dtype(self.dtype).itemsize + bound

    def empty(self, rows: int) -> NDArray[Any]:
        """Make an array for the values of ``rows`` samples, whatever is in it: [rows, *shape], with the greatest first
        length where they differ in it.
        """
        return np.empty((rows, *self._lengths), self.dtype)

    def zeros(self, rows: int) -> Column:
        """Return zeros for ``rows`` samples, the most that they may have."""
        values = np.zeros((rows, *self._lengths), self.dtype)
        if not self.is_packed:
            return values
        return Packed(values.reshape(-1, *self._lengths[1:]), np.arange(rows + 1) * self.longest)


def memory(column: Column) -> tuple[NDArray[Any], ...]:
    """Return the arrays in which values lie."""
    return (column.values, column.bounds) if isinstance(column, Packed) else (column,)


def concatenated(columns: Sequence[Column]) -> Column:
    """Return the values of several runs of samples, one after the other, as a copy."""
    if not isinstance(columns[0], Packed):
        return np.concatenate(cast("Sequence[NDArray[Any]]", columns))
    pieces = [column.own() for column in cast("Sequence[Packed]", columns)]
    lengths = np.concatenate([np.diff(bounds) for _, bounds in pieces])
    return Packed(np.concatenate([values for values, _ in pieces]), _bounds_of(lengths))


def _bounds_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


IMAGE = "image"
"""Name of the field that prep makes of a sample's bytes."""

LABEL = Field("label", (), "int64")
"""The class of a sample, as an index into the names of classes."""

LABELS = "labels"
"""Name of the field with the classes of the objects in a sample, as indices into the names of classes."""

SAMPLE_ID = Field("sample_id", (), "int64")
"""The number of a sample in its dataset, which every minibatch has."""
