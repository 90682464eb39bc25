"""Plans the steps for the samples of a block.

All random parameters of a block are drawn before any pixel is touched, so all engines execute the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mbaas.order import uniforms
from mbaas.prep.boxes import moved, sizes_after
from mbaas.transforms import ColorJitter, Map, RandomHorizontalFlip, Transform
from mbaas.transforms.base import BoxesNow, Drawn, Flips, Recolorings, Step, WindowTransform

Stage = tuple[int, Transform]
"""A transform and its index in the pipeline, which is also its substream of random numbers."""


def stages_of(transforms: Sequence[Transform]) -> tuple[tuple[Stage, ...], ...]:
    """Split the transforms after DecodeImage into runs, before each Map, because later steps depend on its result."""
    runs: list[list[Stage]] = [[]]
    # Enumerate before dropping DecodeImage, so that an index here is the index in the pipeline.
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
    boxes: BoxesNow | None = None,
) -> list[Step]:
    """Draw the steps of ``stages`` (without Maps) for n samples at once; one by one would be slower.

    Args:
        sizes: int64[n, 2], (height, width) of the images in pixels.
        boxes: boxes before the first step; required if a transform depends on boxes.
    """
    steps: list[Step] = []
    for substream, transform in stages:
        u = uniforms(seed, epoch, sample_ids, substream=substream, draws=transform.draws)
        if isinstance(transform, WindowTransform):
            more = partial(_more, seed, epoch, sample_ids, substream)
            steps.append(transform.windows(Drawn(u, sizes[:, 0], sizes[:, 1], boxes, more)))
        elif isinstance(transform, RandomHorizontalFlip):
            steps.append(Flips(transform.flips(u)))
        elif isinstance(transform, ColorJitter):
            steps.append(Recolorings(transform.changes(u)))
        else:  # Normalize, which runs elsewhere
            continue
        # Input of the next transform.
        boxes = None if boxes is None else moved(boxes, sizes, steps[-1])
        sizes = sizes_after(sizes, steps[-1])
    return steps


def _more(
    seed: int,
    epoch: int,
    sample_ids: NDArray[np.int64],
    substream: int,
    rows: NDArray[np.int64],
    first: int,
    count: int,
) -> NDArray[np.float64]:
    return uniforms(seed, epoch, sample_ids[rows], substream=substream, draws=count, first=first)
