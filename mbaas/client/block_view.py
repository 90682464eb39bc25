"""A block in a consumer's hands: one part or several, seen as one run of rows in canonical order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.messages import ROW, Arrays


def rows(arrays: Arrays) -> int:
    """Samples in ``arrays``."""
    return len(arrays["sample_id"])


def take(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Rows ``[start, stop)`` as views."""
    return {name: array[start:stop] for name, array in arrays.items()}


def read_only(arrays: Arrays) -> Arrays:
    """Views of own arrays, which nobody can make writable."""
    for array in arrays.values():
        array.flags.writeable = False
    return {name: array.view() for name, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class _PartSlice:
    """What of one part is in a mosaic.

    Attributes:
        arrays: of the part, whole.
        entries: indices into these, ascending.
        places: of the entries, in the mosaic, ascending.
    """

    arrays: Arrays
    entries: NDArray[np.intp]
    places: NDArray[np.intp]

    def cut(self, start: int, stop: int) -> _PartSlice:
        """The entries at places ``[start, stop)``."""
        low, high = np.searchsorted(self.places, (start, stop))
        return _PartSlice(self.arrays, self.entries[low:high], self.places[low:high])

    @property
    def is_one_piece(self) -> bool:
        """Whether no other entries lie between these."""
        return len(self.entries) > 0 and int(self.entries[-1] - self.entries[0]) + 1 == len(self.entries)


class BlockView:
    """Parts of a block as one.

    What lies in one piece comes as views; what does not is put together in fresh arrays, read-only like the views.
    Either way the bytes are the same: they do not depend on how the block was cut.

    Args:
        parts: each with ``sample_id``; several parts also with ``row``, ascending, no row twice.

    Attributes:
        rows: int64[n], which rows of the block these are, ascending; None if the one part did not say.
    """

    def __init__(self, parts: list[Arrays]) -> None:
        self.rows: NDArray[np.int64] | None = None
        places = [np.arange(rows(parts[0]))]
        if all(ROW in part for part in parts):
            order = self.rows = np.sort(np.concatenate([part[ROW] for part in parts]))
            places = [np.searchsorted(order, part[ROW]) for part in parts]
        self._lay(
            [
                _PartSlice({name: array for name, array in part.items() if name != ROW}, np.arange(rows(part)), place)
                for part, place in zip(parts, places, strict=True)
            ]
        )

    def _lay(self, tiles: list[_PartSlice]) -> None:
        self._tiles = tiles
        self._size = sum(len(tile.entries) for tile in tiles)
        self._piece: Arrays | None = None  # all of it, if that is one piece of one part
        if len(tiles) == 1 and tiles[0].is_one_piece:
            first = int(tiles[0].entries[0])
            self._piece = take(tiles[0].arrays, first, first + self._size)

    def __len__(self) -> int:
        return self._size

    def only(self, indices: NDArray[np.intp]) -> BlockView:
        """A mosaic of the rows with these indices, ascending."""
        chosen = object.__new__(BlockView)
        chosen.rows = None if self.rows is None else self.rows[indices]
        kept = [np.isin(tile.places, indices, assume_unique=True) for tile in self._tiles]
        chosen._lay(
            [
                _PartSlice(tile.arrays, tile.entries[keep], np.searchsorted(indices, tile.places[keep]))
                for tile, keep in zip(self._tiles, kept, strict=True)
            ]
        )
        return chosen

    def take(self, start: int, stop: int) -> Arrays:
        """Rows ``[start, stop)``."""
        if self._piece is not None:
            return take(self._piece, start, stop)
        tiles = [tile for tile in (tile.cut(start, stop) for tile in self._tiles) if len(tile.entries)]
        if len(tiles) == 1 and tiles[0].is_one_piece:
            first = int(tiles[0].entries[0])
            return take(tiles[0].arrays, first, first + stop - start)
        return _put_together(tiles, start, stop) if tiles else take(self._tiles[0].arrays, 0, 0)


def _put_together(tiles: list[_PartSlice], start: int, stop: int) -> Arrays:
    out = {}
    for name, first in tiles[0].arrays.items():
        array = out[name] = np.empty((stop - start, *first.shape[1:]), first.dtype)
        for tile in tiles:
            array[tile.places - start] = tile.arrays[name][tile.entries]
    return read_only(out)
