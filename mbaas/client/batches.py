"""Cuts minibatches of any size from blocks of any size: as views of shared memory where that is possible, else copies.

A block lies in memory as the arrays of its parts, each on the node where it was made. `BlockView` shows them as one run
of rows in the epoch's order, `BatchCutter` cuts minibatches from a sequence of such views. Whichever way a minibatch
comes about, its bytes are the same.

An array tells by its flag whose it is. Read-only, it may be a view of what others read, too; nobody can make it
writable. Writable, it was put together for this minibatch, and nobody else sees it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.client.recycled import RecycledMemory
from mbaas.fields import Arrays, Column, Packed, concatenated, interleaved
from mbaas.messages import ROW


def rows_of(arrays: Arrays) -> int:
    """Return how many samples ``arrays`` hold."""
    return len(arrays["sample_id"])


def _slice(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Return rows ``[start, stop)`` as views."""
    return {name: array[start:stop] for name, array in arrays.items()}


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that nobody can make writable again, as views of shared memory are."""
    array.flags.writeable = False  # else a view of it could be made writable
    return array.view()


def is_private(array: NDArray[Any]) -> bool:
    """Tell whether an array of a minibatch is the minibatch's alone."""
    return array.flags.writeable


def _shared(column: Column) -> Column:
    """Return what nobody can write to."""
    if isinstance(column, Packed):
        shapes = None if column.shapes is None else read_only(column.shapes)
        return Packed(read_only(column.values), read_only(column.bounds), shapes)
    return read_only(column)


def _own(column: Column, memory: RecycledMemory) -> Column:
    """Return a copy, unless it is private already."""
    if not isinstance(column, Packed):
        return column if is_private(column) else memory.copy(column)
    if is_private(column.values):
        return column
    values, bounds = column.own()
    return Packed(memory.copy(values), bounds.copy(), None if column.shapes is None else column.shapes.copy())


class _PartSlice(Struct, frozen=True, eq=False):
    """Some samples of one part of a block, and where they are in a view of the block.

    Attributes:
        arrays: all of the part.
        entries: indices of the samples in ``arrays``, ascending.
        view_rows: indices of the same samples in the view, ascending.
    """

    arrays: Arrays
    entries: NDArray[np.intp]
    view_rows: NDArray[np.intp]

    def between(self, start: int, stop: int) -> _PartSlice:
        """Return the samples in rows ``[start, stop)`` of the view."""
        low, high = np.searchsorted(self.view_rows, (start, stop))
        return _PartSlice(self.arrays, self.entries[low:high], self.view_rows[low:high])

    def as_views(self) -> Arrays | None:
        """Return the samples as views; None if others lie between them, or if there are none."""
        count = len(self.entries)
        if not count or int(self.entries[-1] - self.entries[0]) + 1 != count:
            return None
        return _slice(self.arrays, int(self.entries[0]), int(self.entries[0]) + count)


class BlockView:
    """The samples of a block, or some of them, as one run of rows, whatever parts they lie in.

    Args:
        parts: arrays with ``sample_id``; where there are several parts, also with ``row``, ascending, and no row is in
            two of them.

    Attributes:
        rows: int64[n], which rows of the block these are, ascending; None if the only part did not say, because it is
            all that is left of the block without its bad samples.
    """

    def __init__(self, parts: list[Arrays]) -> None:
        self.rows: NDArray[np.int64] | None = None
        view_rows: list[Any] = [np.arange(rows_of(parts[0]))]
        if all(ROW in part for part in parts):
            rows = self.rows = np.sort(np.concatenate([part[ROW] for part in parts]))
            view_rows = [np.searchsorted(rows, part[ROW]) for part in parts]
        self._set_slices(
            [
                _PartSlice(
                    {name: _shared(column) for name, column in part.items() if name != ROW},
                    np.arange(rows_of(part)),
                    in_view,
                )
                for part, in_view in zip(parts, view_rows, strict=True)
            ]
        )

    def _set_slices(self, slices: list[_PartSlice]) -> None:
        self._slices = slices
        self._size = sum(len(each.entries) for each in slices)
        # most blocks are one piece of one part, and then every minibatch is a plain slice of it
        self._views = slices[0].as_views() if len(slices) == 1 else None

    def __len__(self) -> int:
        return self._size

    def only(self, indices: NDArray[np.intp]) -> BlockView:
        """Return a view of the rows with these indices, ascending."""
        chosen = object.__new__(BlockView)  # its slices are cut from these, not built from parts
        chosen.rows = None if self.rows is None else self.rows[indices]
        kept = [np.isin(each.view_rows, indices, assume_unique=True) for each in self._slices]
        chosen._set_slices(
            [
                _PartSlice(each.arrays, each.entries[keep], np.searchsorted(indices, each.view_rows[keep]))
                for each, keep in zip(self._slices, kept, strict=True)
            ]
        )
        return chosen

    def take(self, start: int, stop: int) -> Arrays:
        """Return rows ``[start, stop)``: read-only views if they lie in one piece, else fresh arrays."""
        if self._views is not None:
            return _slice(self._views, start, stop)
        slices = [each for each in (one.between(start, stop) for one in self._slices) if len(each.entries)]
        if not slices:
            return _slice(self._slices[0].arrays, 0, 0)
        views = slices[0].as_views() if len(slices) == 1 else None
        return views if views is not None else _put_together(slices, start, stop)


def _put_together(slices: list[_PartSlice], start: int, stop: int) -> Arrays:
    # Slices interleave where homes do, so each row is written where it belongs; once, straight into the minibatch.
    first = slices[0].arrays
    together: Arrays = {
        name: np.empty((stop - start, *column.shape[1:]), column.dtype)
        for name, column in first.items()
        if not isinstance(column, Packed)
    }
    for each in slices:
        views = each.as_views()
        for name, array in together.items():
            # Rows that are chosen by their numbers are copied on the way.
            array[each.view_rows - start] = each.arrays[name][each.entries] if views is None else views[name]
    for name in first:
        if name not in together:
            together[name] = interleaved([(each.arrays[name], each.entries, each.view_rows - start) for each in slices])
    return together


@dataclass
class _Remainder:
    """Rows ``[start, stop)`` of a block, which no minibatch has yet."""

    block: BlockView
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, most: int) -> Arrays:
        """Take away the first rows, at most ``most``, and return them."""
        start, self.start = self.start, min(self.start + most, self.stop)
        return self.block.take(start, self.start)


class BatchCutter:
    """Cuts minibatches from a sequence of blocks.

    A minibatch that lies in one piece of a block is a read-only view of it; any other is a copy, and writable.

    Args:
        memory: where copies of what is left of a block go; default: of its own.

    Attributes:
        pending: what was put in and not yet cut, in order; none of it is empty.
    """

    def __init__(self, memory: RecycledMemory | None = None) -> None:
        self.pending: deque[_Remainder] = deque()
        self._memory = RecycledMemory() if memory is None else memory

    def put(self, block: BlockView) -> None:
        """Append a block."""
        if len(block):
            self.pending.append(_Remainder(block, 0, len(block)))

    def detach_copy(self) -> None:
        """Copy what is left of the last block, so that the block can be let go while the next one is awaited."""
        if self.pending:
            left = self.pending[-1]
            taken = left.take(len(left))
            own = {name: _own(column, self._memory) for name, column in taken.items()}
            self.pending[-1] = _Remainder(BlockView([own]), 0, rows_of(own))

    def cut(self, size: int) -> Arrays:
        """Return the next ``size`` rows, at least one; there must be as many."""
        pieces = []
        while size:
            piece = self._take_first(size)
            size -= rows_of(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else _concatenated(pieces)

    def _take_first(self, most: int) -> Arrays:
        first = self.pending[0]
        piece = first.take(most)
        if not len(first):
            self.pending.popleft()
        return piece


def _concatenated(pieces: list[Arrays]) -> Arrays:
    return {name: concatenated([piece[name] for piece in pieces]) for name in pieces[0]}
