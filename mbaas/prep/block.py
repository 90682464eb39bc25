"""The samples of a block whose headers are good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.engine import BadRow, Encoded
from mbaas.prep.header import Header, UndecodableError, peek


@dataclass(frozen=True)
class Block:
    """What both engines start from.

    Attributes:
        rows: indices in the block of the n samples that have a good header.
        encoded: their bytes.
        headers: their headers.
        sample_ids: int64[n], their ids.
        epoch: of the block; random transforms depend on it.
        bad: all other samples; grows while the block is prepared.
    """

    rows: list[int]
    encoded: list[memoryview]
    headers: list[Header]
    sample_ids: NDArray[np.int64]
    epoch: int
    bad: list[BadRow]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[n, 2], (height, width) of the upright images in pixels."""
        return np.array([header.size for header in self.headers], np.int64).reshape(-1, 2)

    def finish(self, out: NDArray[Any]) -> list[BadRow]:
        """Zero the bad rows of ``out``, and return them in order.

        An engine may have written a part of a row before it failed: what such a row holds must not depend on which.
        """
        for bad in self.bad:
            out[bad.row] = 0
        return sorted(self.bad, key=lambda bad: bad.row)


def open_block(encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, max_pixels: int) -> Block:
    """Read the headers of ``encoded``, the samples with ``sample_ids`` int64[len(encoded)]."""
    rows: list[int] = []
    block = Block(rows, [], [], sample_ids, epoch, [])
    for row, item in enumerate(encoded):
        view = memoryview(cast("Any", item))
        try:
            block.headers.append(peek(view, max_pixels))
        except UndecodableError as error:
            block.bad.append(BadRow(row, str(error)))
        else:
            rows.append(row)
            block.encoded.append(view)
    return Block(rows, block.encoded, block.headers, sample_ids[rows], epoch, block.bad) if block.bad else block
