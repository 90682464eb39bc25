"""Cutting minibatches out of blocks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""Named arrays whose first dimension is the sample."""


def rows(arrays: Arrays) -> int:
    """Samples in ``arrays``."""
    return len(arrays["sample_id"])


def take(arrays: Arrays, start: int, stop: int) -> Arrays:
    """Rows ``[start, stop)`` as views."""
    return {name: array[start:stop] for name, array in arrays.items()}


class Cutter:
    """Cuts minibatches of one size from a sequence of blocks of any size.

    A minibatch that lies inside a block is a view of it; one that crosses blocks is a copy.

    Attributes:
        pending: rows that were put in and not yet cut, in order; never empty arrays.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.pending: deque[Arrays] = deque()
        self._rows = 0

    def put(self, arrays: Arrays) -> None:
        """Append a block."""
        if rows(arrays):
            self.pending.append(arrays)
            self._rows += rows(arrays)

    def settle(self) -> None:
        """Copy what is left of the last block, so that the block can be let go while the next one is awaited."""
        if self.pending:
            self.pending[-1] = _read_only({name: array.copy() for name, array in self.pending[-1].items()})

    def full(self) -> bool:
        """Whether a whole minibatch can be cut."""
        return self._rows >= self.batch_size

    def cut(self) -> Arrays | None:
        """The next minibatch, smaller than ``batch_size`` if fewer rows are left; None if there are none."""
        wanted = min(self.batch_size, self._rows)
        if wanted == 0:
            return None
        self._rows -= wanted
        pieces = []
        while wanted:
            piece = self._take_first(wanted)
            wanted -= rows(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else _join(pieces)

    def _take_first(self, most: int) -> Arrays:
        first = self.pending.popleft()
        if rows(first) > most:
            self.pending.appendleft(take(first, most, rows(first)))
        return take(first, 0, most)


def _join(pieces: list[Arrays]) -> Arrays:
    return _read_only({name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]})


def _read_only(arrays: Arrays) -> Arrays:
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def share(arrays: Arrays, rank: int, world_size: int) -> Arrays:
    """Rank's part of a global minibatch: consecutive rows, sizes differing by at most one."""
    n = rows(arrays)
    return take(arrays, n * rank // world_size, n * (rank + 1) // world_size)
