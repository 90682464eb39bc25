"""Moves the keypoints of samples along with the pixels, by the same plan for all engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.fields import Column, Packed
from mbaas.prep.boxes import sizes_after
from mbaas.transforms.base import Flips, Step, Windows
from mbaas.transforms.on_image import Keypoints


def move_keypoints(keypoints: Keypoints, column: Column, sizes: NDArray[np.int64], steps: Sequence[Step]) -> Column:
    """Return the keypoints ``column`` of n samples after ``steps``; ``sizes`` int64[n, 2] are (height, width)."""
    if isinstance(column, Packed):
        values, bounds = column.own()
        owner = np.repeat(np.arange(len(sizes)), np.diff(bounds))
        return Packed(_moved(keypoints, values, owner, sizes, steps), bounds)
    return _moved(keypoints, column, np.arange(len(sizes)), sizes, steps)


def _moved(
    keypoints: Keypoints,
    values: NDArray[np.floating],
    owner: NDArray[np.int64],
    sizes: NDArray[np.int64],
    steps: Sequence[Step],
) -> NDArray[np.floating]:
    """Move values [total, ..., points, 2 or 3]; ``owner``, int64[total], is the image of each."""
    points = values.astype(np.float64)
    axes = (len(values),) + (1,) * (points.ndim - 2)  # shape that broadcasts one number per image
    swapped = np.arange(points.shape[-2])
    for one, other in keypoints.swaps:
        swapped[[one, other]] = other, one
    _leave_outside(points, sizes[owner], axes)
    for step in steps:
        if isinstance(step, Windows):
            windows, results = step.boxes[owner], step.sizes[owner]
            points[..., 0] -= windows[:, 1].reshape(axes)
            points[..., 1] -= windows[:, 0].reshape(axes)
            _leave_outside(points, windows[:, 2:], axes)
            scale = results / windows[:, 2:]
            points[..., 0] *= scale[:, 1].reshape(axes)
            points[..., 1] *= scale[:, 0].reshape(axes)
        elif isinstance(step, Flips):
            mirrored = step.which[owner]
            # Pixels are numbered from 0, so x becomes width - 1 - x.
            flipped = points[mirrored][..., swapped, :]
            flipped[..., 0] = sizes[owner][mirrored, 1].reshape(-1, *axes[1:]) - 1 - flipped[..., 0]
            points[mirrored] = flipped
        sizes = sizes_after(sizes, step)
    if points.shape[-1] == 3:
        points[points[..., 2] == 0] = 0.0
    return points.astype(values.dtype)


def _leave_outside(points: NDArray[np.float64], sizes: NDArray[np.int64], axes: tuple[int, ...]) -> None:
    """Clip points to images with these sizes (height, width); clear the visibility, if any, of points outside."""
    x, y = points[..., 0], points[..., 1]
    heights, widths = sizes[:, 0].reshape(axes), sizes[:, 1].reshape(axes)
    if points.shape[-1] == 3:
        points[..., 2][(x < 0) | (x >= widths) | (y < 0) | (y >= heights)] = 0.0
    np.clip(x, 0, widths - 1, out=x)
    np.clip(y, 0, heights - 1, out=y)
