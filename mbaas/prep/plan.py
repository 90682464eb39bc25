"""The random parameters of a block, drawn before any pixel is touched; both engines execute the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbaas.order import uniforms
from mbaas.transforms import ColorJitter, Map, RandomHorizontalFlip, Transform
from mbaas.transforms.base import Drawn, Windows, WindowTransform


@dataclass(frozen=True)
class Flips:
    """bool[n]: which samples are mirrored."""

    which: NDArray[np.bool_]


@dataclass(frozen=True)
class Recolorings:
    """float64[n, s, 4]: what ``ColorJitter.changes`` returns."""

    changes: NDArray[np.float64]


Step = Windows | Flips | Recolorings
Stage = tuple[int, Transform]
"""A transform and its index in the pipeline, which is its random stream."""


def stages_of(transforms: Sequence[Transform]) -> tuple[tuple[Stage, ...], ...]:
    """Split the transforms after DecodeImage before each Map: a run of transforms can be planned as one.

    Every run but the first begins with its Map.
    """
    runs: list[list[Stage]] = [[]]
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
    """The steps of ``stages``, which hold no Map, for n samples whose images have ``sizes`` int64[n, 2].

    All samples of a block at once: drawing for each alone would cost more than some of the transforms.
    """
    steps: list[Step] = []
    for stream, transform in stages:
        u = uniforms(seed, epoch, sample_ids, stream=stream, draws=transform.draws)
        if isinstance(transform, WindowTransform):
            windows = transform.windows(Drawn(u, sizes[:, 0], sizes[:, 1]))
            sizes = windows.sizes
            steps.append(windows)
        elif isinstance(transform, RandomHorizontalFlip):
            steps.append(Flips(transform.flips(u)))
        elif isinstance(transform, ColorJitter):
            steps.append(Recolorings(transform.changes(u)))
    return steps
