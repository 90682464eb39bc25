"""Cuts minibatches of any size from blocks of any size, as views of shared memory where possible, otherwise as copies.

`BlockView` presents the parts of a block, each made on its own node, as one run of rows in epoch order. `BatchCutter`
cuts minibatches from a sequence of views. Views and copies have the same bytes. An array's ``writeable`` flag shows its
owner: read-only arrays may be shared and can never be made writable, writable ones belong to this minibatch alone.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import DTypeLike, NDArray

from mbaas.samples.fields import Arrays, Column, Packed, concatenated, interleaved
from mbaas.wire.blocks import ROW

LEAST_REUSED_BYTES = 2**20
"""Smaller arrays are left to NumPy, whose allocator reuses their memory anyway."""

FREE_PIECES = 2
"""Free pieces kept for reuse by default: a trial has one minibatch while it is given the next."""

SPARE_PART = 8
"""A new piece is larger than requested by one part in this many, so that it also fits slightly larger arrays."""


def rows_of(arrays: Arrays) -> int:
    """Return the number of samples in ``arrays``."""
    return len(arrays["sample_id"])


def _slice(arrays: Arrays, start: int, stop: int) -> Arrays:
    return {name: array[start:stop] for name, array in arrays.items()}


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that can never be made writable again, like views of shared memory."""
    array.flags.writeable = False  # so that no view of it can be made writable either
    return array.view()


def is_private(array: NDArray[Any]) -> bool:
    """Return whether an array belongs to its minibatch alone."""
    return array.flags.writeable


def _shared(column: Column) -> Column:
    if isinstance(column, Packed):
        shapes = None if column.shapes is None else read_only(column.shapes)
        return Packed(read_only(column.values), read_only(column.bounds), shapes)
    return read_only(column)


def private(column: Column, memory: RecycledMemory) -> Column:
    """Return a column with memory of its own: the same one if it is no view, otherwise a copy."""
    if not isinstance(column, Packed):
        return column if column.flags.owndata else memory.copy(column)
    if column.values.flags.owndata:
        return column
    values, bounds = column.own()
    return Packed(memory.copy(values), bounds.copy(), None if column.shapes is None else column.shapes.copy())


class _PartSlice(Struct, frozen=True, eq=False):
    """Some samples of one part: ascending ``entries`` in ``arrays``, and their ascending ``view_rows`` in the view."""

    arrays: Arrays
    entries: NDArray[np.intp]
    view_rows: NDArray[np.intp]

    def between(self, start: int, stop: int) -> _PartSlice:
        low, high = np.searchsorted(self.view_rows, (start, stop))
        return _PartSlice(self.arrays, self.entries[low:high], self.view_rows[low:high])

    def as_views(self) -> Arrays | None:
        count = len(self.entries)
        if not count or int(self.entries[-1] - self.entries[0]) + 1 != count:
            return None
        return _slice(self.arrays, int(self.entries[0]), int(self.entries[0]) + count)


class BlockView:
    """The samples of a block, or a subset, as one run of rows across all parts.

    Args:
        parts: arrays with ``sample_id``; several parts also have ``row``, ascending and disjoint.
        are_private: whether the arrays belong to this consumer alone, and so do minibatches cut from them.

    Attributes:
        rows: int64[n], rows of the block, ascending; None for a single part without ``row``, which is the whole block
            without its bad samples.
    """

    def __init__(self, parts: list[Arrays], *, are_private: bool = False) -> None:
        self.rows: NDArray[np.int64] | None = None
        view_rows: list[Any] = [np.arange(rows_of(parts[0]))]
        if all(ROW in part for part in parts):
            rows = self.rows = np.sort(np.concatenate([part[ROW] for part in parts]))
            view_rows = [np.searchsorted(rows, part[ROW]) for part in parts]
        self._set_slices(
            [
                _PartSlice(
                    {name: column if are_private else _shared(column) for name, column in part.items() if name != ROW},
                    np.arange(rows_of(part)),
                    in_view,
                )
                for part, in_view in zip(parts, view_rows, strict=True)
            ]
        )

    def _set_slices(self, slices: list[_PartSlice]) -> None:
        self._slices = slices
        self._size = sum(len(each.entries) for each in slices)
        # Most blocks are one contiguous piece of one part, so that every minibatch is a plain slice.
        self._views = slices[0].as_views() if len(slices) == 1 else None

    def __len__(self) -> int:
        return self._size

    def only(self, indices: NDArray[np.intp]) -> BlockView:
        """Return a view of the rows with these indices, ascending."""
        chosen = object.__new__(BlockView)  # its slices are cut from existing ones, not built from parts
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
        """Return rows ``[start, stop)``: read-only views if they are contiguous in memory, otherwise new arrays."""
        if self._views is not None:
            return _slice(self._views, start, stop)
        slices = [each for each in (one.between(start, stop) for one in self._slices) if len(each.entries)]
        if not slices:
            return _slice(self._slices[0].arrays, 0, 0)
        views = slices[0].as_views() if len(slices) == 1 else None
        return views if views is not None else _put_together(slices, start, stop)


def _put_together(slices: list[_PartSlice], start: int, stop: int) -> Arrays:
    # Slices interleave in the same way as home nodes do. Write each row once, directly to its position in the
    # minibatch.
    first = slices[0].arrays
    together: Arrays = {
        name: np.empty((stop - start, *column.shape[1:]), column.dtype)
        for name, column in first.items()
        if not isinstance(column, Packed)
    }
    for each in slices:
        views = each.as_views()
        for name, array in together.items():
            # Indexing by entry numbers copies the rows.
            array[each.view_rows - start] = each.arrays[name][each.entries] if views is None else views[name]
    for name in first:
        if name not in together:
            together[name] = interleaved([(each.arrays[name], each.entries, each.view_rows - start) for each in slices])
    return together


@dataclass
class _Remainder:
    block: BlockView
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, most: int) -> Arrays:
        start, self.start = self.start, min(self.start + most, self.stop)
        return self.block.take(start, self.start)


class BatchCutter:
    """Cuts minibatches from a sequence of blocks.

    A minibatch within one contiguous piece of a block is a read-only view; any other is a writable copy. ``pending``
    contains the non-empty remainders of blocks, in order.
    """

    def __init__(self, memory: RecycledMemory | None = None) -> None:
        self.pending: deque[_Remainder] = deque()
        self._memory = RecycledMemory() if memory is None else memory

    def put(self, block: BlockView) -> None:
        """Append a block."""
        if len(block):
            self.pending.append(_Remainder(block, 0, len(block)))

    def detach_copy(self) -> None:
        """Copy the remainder of the last block, so that the block can be released while the next one is awaited."""
        if self.pending:
            left = self.pending[-1]
            taken = left.take(len(left))
            own = {name: private(column, self._memory) for name, column in taken.items()}
            self.pending[-1] = _Remainder(BlockView([own], are_private=True), 0, rows_of(own))

    def cut(self, size: int) -> Arrays:
        """Return the next ``size`` rows; ``size`` must be at least 1 and at most the number of pending rows."""
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


class RecycledMemory:
    """Private memory for minibatches, reused when unreferenced. One thread allocates; any thread may release arrays.

    Copying a large minibatch spends most time on new memory. Arrays above 32 MiB are allocated from the system each
    time, zeroed page by page, and freed with the minibatch. 256 images of 224x224 take 38 MB; copying them to reused
    memory takes half the time.

    An array's memory stays exclusive while the array, any view, or a tensor that shares it is referenced.
    """

    def __init__(self, free_pieces: int = FREE_PIECES) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=free_pieces)  # unreferenced; the oldest are freed

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized, writable array in C order."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < LEAST_REUSED_BYTES:
            return np.empty(shape, dtype)
        memory = self._taken()
        if memory is None or memory.nbytes < nbytes:
            memory = np.empty(nbytes + nbytes // SPARE_PART, np.uint8)
        # A separate array for each holder. All NumPy views refer to it, and none to ``memory`` directly, because a
        # buffer is in between. So when the array is finalized, the memory is unreferenced.
        array = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array.view(dtype).reshape(shape)

    def _taken(self) -> NDArray[np.uint8] | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy, in C order."""
        own = self.empty(array.shape, array.dtype)
        np.copyto(own, array)
        return own
