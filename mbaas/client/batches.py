"""Cutting minibatches out of blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from mbaas.client.block_view import BlockView, read_only, rows
from mbaas.messages import Arrays


@dataclass
class _Rest:
    """Rows ``[start, stop)`` of a block that were not cut yet."""

    block: BlockView
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, most: int) -> Arrays:
        """The first rows, at most so many; they are gone from here."""
        start, self.start = self.start, min(self.start + most, self.stop)
        return self.block.take(start, self.start)


class BatchCutter:
    """Cuts minibatches of any size from a sequence of blocks of any size.

    A minibatch that lies in one piece in a block is a view of it; any other is a copy.

    Attributes:
        pending: what was put in and not yet cut, in order; none of it is empty.
    """

    def __init__(self) -> None:
        self.pending: deque[_Rest] = deque()

    def put(self, block: BlockView) -> None:
        """Append a block."""
        if len(block):
            self.pending.append(_Rest(block, 0, len(block)))

    def detach_copy(self) -> None:
        """Copy what is left of the last block, so that the block can be let go while the next one is awaited."""
        if self.pending:
            left = self.pending[-1]
            copied = read_only({name: array.copy() for name, array in left.take(len(left)).items()})
            self.pending[-1] = _Rest(BlockView([copied]), 0, rows(copied))

    def cut(self, size: int) -> Arrays:
        """The next ``size`` rows, at least one; there must be as many."""
        pieces = []
        while size:
            piece = self._take_first(size)
            size -= rows(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else _join(pieces)

    def _take_first(self, most: int) -> Arrays:
        first = self.pending[0]
        piece = first.take(most)
        if not len(first):
            self.pending.popleft()
        return piece


def _join(pieces: list[Arrays]) -> Arrays:
    return read_only({name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]})
