"""Cutting minibatches out of blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from mbaas.delivery.mosaic import Arrays, Mosaic, rows, take


@dataclass
class _Rest:
    """Rows ``[start, stop)`` of a block that were not cut yet."""

    block: Mosaic
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, most: int) -> Arrays:
        """The first rows, at most so many; they are gone from here."""
        start, self.start = self.start, min(self.start + most, self.stop)
        return self.block.take(start, self.start)


class Cutter:
    """Cuts minibatches of one size from a sequence of blocks of any size.

    A minibatch that lies inside one part of a block is a view of it; one that crosses parts or blocks is a copy.

    Attributes:
        pending: what was put in and not yet cut, in order; none of it is empty.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.pending: deque[_Rest] = deque()
        self._rows = 0

    def put(self, block: Mosaic, start: int = 0) -> None:
        """Append a block, from row ``start`` on."""
        rest = _Rest(block, start, len(block))
        if len(rest):
            self.pending.append(rest)
            self._rows += len(rest)

    def settle(self) -> None:
        """Copy what is left of the last block, so that the block can be let go while the next one is awaited."""
        if self.pending:
            left = self.pending[-1]
            copied = _read_only({name: array.copy() for name, array in left.take(len(left)).items()})
            self.pending[-1] = _Rest(Mosaic([copied]), 0, rows(copied))

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
        first = self.pending[0]
        piece = first.take(most)
        if not len(first):
            self.pending.popleft()
        return piece


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
