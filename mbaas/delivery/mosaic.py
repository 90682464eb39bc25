"""A block in a consumer's hands: one part or several, seen as one run of rows in canonical order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""Named arrays whose first dimension is the sample."""

ROW = "row"
"""The array of a part that says which rows of the block it has."""


def rows(arrays: Arrays) -> int:
    """Samples in ``arrays``."""
    return len(arrays["sample_id"])


def take(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Rows ``[start, stop)`` as views."""
    return {name: array[start:stop] for name, array in arrays.items()}


class Mosaic:
    """Parts of a block as one.

    What lies in one part comes as views; what lies in several is put together in fresh arrays, which are private.
    Either way the bytes are the same: they do not depend on how the block was cut.

    Args:
        parts: each with ``sample_id``; several parts also with ``row``, ascending, no row twice.
    """

    def __init__(self, parts: list[Arrays]) -> None:
        self._parts = [{name: array for name, array in part.items() if name != ROW} for part in parts]
        self._places: list[NDArray[np.intp]] = []
        if len(parts) > 1:
            order = np.sort(np.concatenate([part[ROW] for part in parts]))
            self._places = [np.searchsorted(order, part[ROW]) for part in parts]

    def __len__(self) -> int:
        return sum(rows(part) for part in self._parts)

    def sample_ids(self) -> NDArray[np.int64]:
        """int64[n], in canonical order."""
        return self._gathered("sample_id", 0, len(self)) if self._places else self._parts[0]["sample_id"]

    def take(self, start: int, stop: int) -> Arrays:
        """Rows ``[start, stop)``."""
        if not self._places:
            return take(self._parts[0], start, stop)
        return {name: self._gathered(name, start, stop) for name in self._parts[0]}

    def _gathered(self, name: str, start: int, stop: int) -> NDArray[Any]:
        first = self._parts[0][name]
        out = np.empty((stop - start, *first.shape[1:]), first.dtype)
        for part, place in zip(self._parts, self._places, strict=True):
            low, high = np.searchsorted(place, (start, stop))
            out[place[low:high] - start] = part[name][low:high]
        return out
