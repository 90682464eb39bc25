"""What both engines start from: the samples of a block whose headers are good, and the plan of what is done to them.

The random parameters of a block are drawn before any pixel is touched, so both engines execute the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.order import uniforms
from mbaas.prep.engine import BadRow, Encoded
from mbaas.prep.header import Header, UndecodableError, peek
from mbaas.transforms import ColorJitter, Map, RandomHorizontalFlip, Transform
from mbaas.transforms.base import Drawn, Windows, WindowTransform


@dataclass(frozen=True)
class PartInput:
    """The samples of a block that can be prepared as far as their headers tell, and those that cannot.

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
        # Two columns also where no sample is good.
        return np.array([header.size for header in self.headers], np.int64).reshape(-1, 2)

    def finish(self, out: NDArray[Any]) -> list[BadRow]:
        """Zero the bad rows of ``out``, and return them in order.

        An engine may have written a part of a row before it failed: what such a row holds must not depend on which.
        """
        for bad in self.bad:
            out[bad.row] = 0
        return sorted(self.bad, key=lambda bad: bad.row)


def read_headers(encoded: Sequence[Encoded], sample_ids: NDArray[np.int64], epoch: int, max_pixels: int) -> PartInput:
    """Read the headers of ``encoded``, the samples with ``sample_ids`` int64[len(encoded)]."""
    rows: list[int] = []
    views: list[memoryview] = []
    headers: list[Header] = []
    bad: list[BadRow] = []
    for row, item in enumerate(encoded):
        view = memoryview(cast("Any", item))
        try:
            headers.append(peek(view, max_pixels))
        except UndecodableError as error:
            bad.append(BadRow(row, str(error)))
        else:
            rows.append(row)
            views.append(view)
    return PartInput(rows, views, headers, sample_ids[rows], epoch, bad)


@dataclass(frozen=True)
class Flips:
    """A step that mirrors the samples where ``which``, bool[n], is true."""

    which: NDArray[np.bool_]


@dataclass(frozen=True)
class Recolorings:
    """A step that changes colours: ``changes``, float64[n, s, 4], is what ``ColorJitter.changes`` returns."""

    changes: NDArray[np.float64]


Step = Windows | Flips | Recolorings
Stage = tuple[int, Transform]
"""A transform and its index in the pipeline, which is its substream of random numbers."""


def stages_of(transforms: Sequence[Transform]) -> tuple[tuple[Stage, ...], ...]:
    """Split the transforms after DecodeImage before each Map: a run of transforms can be planned as one.

    Every run but the first begins with its Map, because what the transforms after it have to do depends on its result.
    """
    runs: list[list[Stage]] = [[]]
    # Counted with DecodeImage, which is left out then: an index here is the index in the pipeline.
    for stage in list(enumerate(transforms))[1:]:
        if isinstance(stage[1], Map):
            runs.append([])
        runs[-1].append(stage)
    return tuple(tuple(run) for run in runs)


def plan(
    stages: Sequence[Stage],
    seed: int,
    epoch: int,
    sample_ids: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> list[Step]:
    """Draw the steps of ``stages``, which hold no Map, for n samples whose images have ``sizes`` int64[n, 2].

    All samples of a block at once: drawing for each alone would cost more than some of the transforms.
    """
    steps: list[Step] = []
    for substream, transform in stages:
        u = uniforms(seed, epoch, sample_ids, substream=substream, draws=transform.draws)
        if isinstance(transform, WindowTransform):
            windows = transform.windows(Drawn(u, sizes[:, 0], sizes[:, 1]))
            sizes = windows.sizes  # what the next transform will see
            steps.append(windows)
        elif isinstance(transform, RandomHorizontalFlip):
            steps.append(Flips(transform.flips(u)))
        elif isinstance(transform, ColorJitter):
            steps.append(Recolorings(transform.changes(u)))
    return steps
